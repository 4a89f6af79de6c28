"""The keys that client libraries are given, and what the server has counted of them."""

import re

import httpx

from tests.support.serving import Server

KEY = "the-key-of-the-clients-0123456789"


SLOW_KEY = "the-key-of-four-tokens-a-second-012"


def num_answers(server: Server, status: str, key: str = "") -> int:
    """How many requests of a class, as "4xx", the server has answered; this question is one of "2xx"."""
    answer = httpx.get(f"{server.url}/metrics", headers={"x-api-key": key} if key else {}, timeout=30)
    lines = answer.raise_for_status().text.splitlines()
    of_class = re.compile(rf'vecd_requests_total{{.*status="{status[0]}\d\d".*}} ')
    return sum(int(float(line.split()[-1])) for line in lines if of_class.match(line))
