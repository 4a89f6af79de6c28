"""Text to token ids, and where a text is cut."""
