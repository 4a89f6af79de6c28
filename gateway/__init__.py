"""The gateway process: speaks HTTP, tokenizes, schedules, dispatches batches to workers and encodes their rows.

Imports `shm` and nothing else of vecd; never torch, never transformers. `docs/architecture.md` walks through it.
"""
