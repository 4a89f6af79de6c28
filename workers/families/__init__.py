"""The layers of model families, as data that every engine reads."""
