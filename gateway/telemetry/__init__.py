"""Counting, logging and tracing: shared metrics, `/metrics`, the access log, spans."""
