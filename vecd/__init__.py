"""vecd, the vector daemon: one importable package.

The rooms lie at the top of the repository (`gateway/`, `workers/`, `shm/`, `client/`, `launch/`, `supervisor.py`); this
folder holds links to them, so that a checkout, an installed wheel and every tool see the same names. Imports nothing:
each process imports what it needs (docs/adr/0020-one-package.md).
"""
