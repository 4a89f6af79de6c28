"""Everything that reads a model's folder."""
