"""Rows to the bytes of a response."""
