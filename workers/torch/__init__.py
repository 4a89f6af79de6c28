"""Engines on torch, and the reference models."""
