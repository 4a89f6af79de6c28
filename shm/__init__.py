"""Everything two processes must agree on: the arena and its slots, the wire messages, and the control messages.

The only package that both the gateway and the workers import. It holds no policy.
"""
