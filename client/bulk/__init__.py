"""`vecd embed`: files of texts in, files of vectors out, through a server's HTTP API and nothing else of it."""
