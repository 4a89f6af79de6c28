"""Programs that talk to a running server over HTTP, and import nothing of it."""
