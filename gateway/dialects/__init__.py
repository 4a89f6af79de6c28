"""The HTTP APIs whose shapes the server speaks, one module each."""
