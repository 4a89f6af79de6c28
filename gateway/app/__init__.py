"""Routes, what handles a request, and what the server says of itself."""
