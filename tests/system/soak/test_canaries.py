"""The search of what servers write finds what it is there to find."""

import base64
import hashlib
import json
import socket
import struct
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.support import canaries
from tests.support.canaries import IDS, KEY, WORD, WORD_IDS, Secrets
from tests.support.serving import Server, running_server
from tests.support.texts import AWKWARD, make_texts

GIVEN_KEY = "a-key-of-this-server"
VECTOR = [float(np.float32(x)) for x in (-0.0345127, 0.000712394, 0.1234567, -0.9172635, 0.0512343, 0.0312)]
LEAKS = {
    "a text": f'request r1: input "{WORD}text of a caller" is bad',
    "a text as base64": "body " + base64.b64encode(f'{{"input": "a {WORD}text"}}'.encode()).decode(),
    "a text as base64, shifted": "body " + base64.b64encode(f'{{"input": "ab {WORD}text"}}'.encode()).decode(),
    "a text as base64, shifted again": "body " + base64.b64encode(f'{{"input": "abc {WORD}text"}}'.encode()).decode(),
    "a text in hexadecimal": f"{WORD} it is".encode().hex(),
    "a text's digest": hashlib.sha256(WORD.encode()).hexdigest(),
    "ids": f"bad ids {list(IDS)}",
    "ids of an array": f"bad ids {np.array(IDS)}",
    "a text's ids": f"tokens={json.dumps([101, *WORD_IDS, 102], separators=(',', ':'))}",
    "a wrong key": f"Bearer {KEY} refused",
    "a key": f"started with {GIVEN_KEY}",
    "a key's digest": "key " + hashlib.sha256(GIVEN_KEY.encode()).hexdigest()[:16],
    "a vector": f"row 3: {VECTOR}",
    "a vector of an array": f"row 3: {np.array(VECTOR, dtype=np.float32)}",
    "a vector in base64": "answer " + base64.b64encode(struct.pack("<6f", *VECTOR)).decode(),
}
INNOCENT = """\
2026-01-01 10:00:00,123 supervisor INFO draining, for at most 30 s
request 00ab: 400, input[1]: token id 1000000000 is not below 30522 (21423 tokens, 0.034512 ms)
  ready in   1.1 s
"""


@pytest.mark.parametrize("leak", LEAKS.values(), ids=LEAKS.keys())
def test_a_leak_is_found(leak, tmp_path):
    log = tmp_path / "stderr"
    secrets = Secrets(keys=[GIVEN_KEY], vectors=[VECTOR])
    log.write_text(INNOCENT + leak + "\n" + INNOCENT)
    found = canaries.search_files(secrets, [log, tmp_path / "gone"])
    assert found
    log.write_text(INNOCENT)
    assert canaries.search_files(secrets, [log]) == []


def test_the_ids_are_what_the_bundled_model_makes_of_the_word(minilm_folder):
    tokenizer = Tokenizer.from_file(str(minilm_folder / "tokenizer.json"))
    tokenizer.no_padding()
    assert tokenizer.encode(f"{WORD} and more").ids[1 : len(WORD_IDS) + 1] == list(WORD_IDS)


def test_every_kind_of_canary_reaches_a_server_and_what_it_writes_of_them_fails_its_test():
    """The leak is put into the log by hand."""
    reached = []

    def plant_and_leak(server: Server) -> None:
        """Each request is answered, most with an error; and a vector is learned for the search."""
        secrets = Secrets(keys=[GIVEN_KEY])
        assert canaries.plant(server.url, secrets) == []
        answers = canaries._exchange(server.url, list(canaries._requests(GIVEN_KEY)))
        reached.append(([int(answer[9:12]) if answer else None for answer in answers], len(secrets.vectors)))
        with server.stderr_path.open("a") as log:
            log.write(f"embedded {WORD} as {secrets.vectors[0][:6]}\n")

    with (
        pytest.raises(AssertionError, match=WORD),
        running_server("--engine", "dummy", "--workers", "1", "--api-key", GIVEN_KEY) as server,
    ):
        plant_and_leak(server)
    [(statuses, num_vectors)] = reached
    assert {200, 400, 401, 404, 431} <= set(statuses) <= set(range(200, 600)), statuses
    assert num_vectors >= 3


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Accepts and never answers, as a server whose processes are stopped."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


def test_planting_ends_whatever_the_server_does(silent_server):
    ended = threading.Event()

    def plant() -> None:
        assert canaries.plant(silent_server, Secrets()) == []
        assert canaries.plant("http://127.0.0.1:1", Secrets()) == []
        ended.set()

    threading.Thread(target=plant, daemon=True).start()
    assert ended.wait(60)


def test_texts_carry_the_word():
    assert {text for text in make_texts(100) if WORD not in text} == set(AWKWARD)
