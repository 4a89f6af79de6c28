"""Sockets and bytes: the sans-IO parser, connections, listeners, TLS, limits on bytes."""
