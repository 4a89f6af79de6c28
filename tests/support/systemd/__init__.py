"""A container that systemd boots in, and clients within it."""
