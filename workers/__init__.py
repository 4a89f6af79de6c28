"""The worker processes: each runs the model on one batch after the other and writes the rows into its arena.

Imports `shm` and nothing else of vecd. torch lives only here. `docs/architecture.md` walks through it.
"""
