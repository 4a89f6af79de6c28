"""The batching policy: how large, when, which sequences and in whose turn. Pure: no socket, task or clock."""
