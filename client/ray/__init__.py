"""vecd on Ray: Ray Serve before the servers of nodes, and vecd in Ray Data (docs/ray.md; `pip install 'vecd[ray]'`).

What Ray needs is imported by `serve` and `data` alone; `environment` and `start` run before Ray does.
"""
