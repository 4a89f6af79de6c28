"""What is counted, logged and traced: shared metrics, `/metrics`, the access log, spans."""
