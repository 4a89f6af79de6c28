"""`vecd embed`: files in, rows out."""
