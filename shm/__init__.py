"""Everything two processes must agree on: the arena and its slots, the wire messages, the control messages,
the model card and the failure codes.

This package is the only one that both the gateway and the workers import. It stands on the standard library,
numpy and pyzmq, and holds no policy: what a process does with a batch or a slot is its own business.
"""
