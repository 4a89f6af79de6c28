"""Tests, and what they share. README.md says what is in which folder."""
