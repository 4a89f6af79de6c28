"""Engines that compute with torch. Nothing outside this package imports torch."""
