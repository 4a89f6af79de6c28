"""The dialects: each parses and renders one HTTP API, and knows no socket and no queue."""
