"""vecd from Python: `vecd.Client`, `vecd.AsyncClient` and `vecd.Server`."""
