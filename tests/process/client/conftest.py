"""A server that answers whatever a test wants."""

from tests.support.fake_server import dead_url, start_server

__all__ = ["dead_url", "start_server"]
