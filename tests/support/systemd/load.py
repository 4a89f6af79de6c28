"""Clients of the server inside a machine: `python load.py PORT SECONDS`, run in that machine's network.

Half of them open a connection for each request, which a server that is away refuses; half keep theirs, as pools do, and
open another when an answer says that it was the last. No request is sent twice. Prints what came of them as JSON.
"""

import json
import sys
import threading
import time
from collections import Counter
from http.client import HTTPConnection, HTTPException

NUM_CLIENTS = 8
_TIMEOUT_S = 60
_MIN_COSINE = 0.999
_TEXTS = [f"text number {number}, of {'some ' * (number % 7)}words" for number in range(20)]


class Load:
    def __init__(self, port: int, seconds: float) -> None:
        self.ends_at = time.monotonic() + seconds
        self.num_answered = 0
        self.failures: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._port = port
        self._lock = threading.Lock()
        self._first: dict[str, list[float]] = {}

    def client(self, index: int) -> None:
        keeps = index % 2 == 0
        connection: HTTPConnection | None = None
        number = index
        while time.monotonic() < self.ends_at:
            text = _TEXTS[number % len(_TEXTS)]
            number += NUM_CLIENTS
            connection = connection or HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT_S)
            began_at = time.monotonic()
            problem, is_last = self._ask(connection, text)
            self._note(problem, time.monotonic() - began_at)
            if problem or is_last or not keeps:
                connection.close()
                connection = None

    def _ask(self, connection: HTTPConnection, text: str) -> tuple[str, bool]:
        """What is wrong, and whether the server closes the connection."""
        try:
            connection.request("POST", "/v1/embeddings", json.dumps({"input": text}))
            answer = connection.getresponse()
            body = answer.read()
        except (OSError, HTTPException) as error:
            return type(error).__name__, True
        if answer.status != 200:
            return str(answer.status), answer.will_close
        vector = json.loads(body)["data"][0]["embedding"]
        with self._lock:
            first = self._first.setdefault(text, vector)
        is_right = sum(a * b for a, b in zip(first, vector, strict=True)) >= _MIN_COSINE
        return "" if is_right else "another vector", answer.will_close

    def _note(self, problem: str, took_s: float) -> None:
        with self._lock:
            self.slowest_s = max(self.slowest_s, took_s)
            if problem:
                self.failures[problem] += 1
            else:
                self.num_answered += 1


def main(port: int, seconds: float) -> None:
    load = Load(port, seconds)
    threads = [threading.Thread(target=load.client, args=[index]) for index in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"answered": load.num_answered, "failed": load.failures, "slowest_s": round(load.slowest_s, 2)}))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
