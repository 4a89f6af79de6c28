"""`vecd plan`: what many documents cost on machines like this one, measured through a server's HTTP API."""
