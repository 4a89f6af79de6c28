"""Values that every room of the gateway speaks: messages, requests, errors, the request timeline, the configuration."""
