"""`vecd bench`: load on a running server, and what it measures."""
