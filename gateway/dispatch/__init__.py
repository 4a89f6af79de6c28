"""Batches to workers over ZeroMQ, rows back to requests, and what follows when a worker dies."""
