"""Texts to token ids: tokenizing, truncating and splitting inputs."""
