"""Tiny models, sentence-transformers' vectors for token ids, and a gateway."""

import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import zmq

from tests.support.checkpoints import Checkpoints
from vecd.model.card import ModelCard
from vecd.shm.arena import ArenaSpec
from vecd.shm.wire import Alive, Batch, Incarnation, Probe, ToGateway, ToWorker, decode_to_gateway, encode
from vecd.workers.batch import PackedBatch
from vecd.workers.config import WorkerConfig


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def minilm(minilm_folder: Path) -> Path:
    return minilm_folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """`checkpoint(family, pooling=…, steps=…, **config)`: a folder; `checkpoints.Checkpoints` has the arguments."""
    return Checkpoints(tmp_path_factory.mktemp)


def varlen_by_hand(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    key_starts: torch.Tensor,
    max_query: int,
    max_key: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """What `torch.nn.attention.varlen.varlen_attn` says that it computes, one sequence after the other."""
    assert starts.dtype == torch.int32
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert max_query == max_key == int(starts.diff().max())
    before, behind = (max_query if reach < 0 else reach for reach in window_size)
    groups = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    for start, stop in pairwise(starts.tolist()):
        q, k, v = (states[start:stop].transpose(0, 1) for states in (query, key, value))
        k, v = k.repeat_interleave(groups, dim=0), v.repeat_interleave(groups, dim=0)
        places = torch.arange(stop - start)
        distance = places[None, :] - places[:, None]
        scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        scores = scores.masked_fill((distance < -before) | (distance > behind), float("-inf"))
        out[start:stop] = (scores.softmax(-1) @ v).transpose(0, 1)
    return out


# --- the other side of the wire ---------------------------------------------------------------------------------

DEADLINE_S = 30.0
DIM = 8
ARENA = ArenaSpec(2, 4, DIM)
CARD = ModelCard("", "", "bert", DIM, DIM, 16, 100, ("mean",), (), False, "")
DUMMY = WorkerConfig(card=CARD, arena=ARENA, engine="dummy", device="cpu", dtype="float32", num_threads=1)
BATCH = PackedBatch(np.array([2, 1], dtype=np.int32), np.array([41, 42, 43], dtype=np.int32))


class FakeGateway:
    """A ROUTER on the listening socket of an endpoint, without a name, as `vecd.gateway.dispatch.dispatcher` has it."""

    def __init__(self, endpoint: "Endpoint") -> None:
        self.address_fd = endpoint.address_fd
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A copy, because libzmq closes what it is given.
        self._socket.setsockopt(zmq.USE_FD, os.dup(endpoint.listening.fileno()))
        self._socket.bind(f"ipc://{endpoint.listening.getsockname()}")

    def send(self, who: Incarnation, message: ToWorker | list[bytes]) -> None:
        frames = message if isinstance(message, list) else encode(message)
        self._socket.send_multipart([who.identity, *frames], zmq.DONTWAIT)

    def receive(self, who: Incarnation, timeout_s: float = DEADLINE_S) -> ToGateway:
        """The next message, which must be from `who`."""
        assert self._socket.poll(int(timeout_s * 1000)), f"nothing from {who} within {timeout_s} s"
        identity, *frames = self._socket.recv_multipart()
        assert identity == who.identity
        return decode_to_gateway(frames)

    def meet(self, who: Incarnation, epoch: int = 1) -> None:
        """Probe until `who` is connected and answers."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            with suppress(zmq.ZMQError):  # EHOSTUNREACH: not connected yet
                self.send(who, Probe(epoch))
            if self._socket.poll(20):
                assert self.receive(who) == Alive(epoch)
                break
        else:
            raise AssertionError(f"{who} does not answer")
        while self._socket.poll(100):  # answers to the probes that were one too many
            assert self.receive(who) == Alive(epoch)

    def close(self) -> None:
        self._context.destroy(linger=0)


class Endpoint:
    """A listening socket whose file is gone, and the O_PATH descriptor that leads to it."""

    def __init__(self, folder: Path) -> None:
        path = folder / "zmq"
        self.listening = socket.socket(socket.AF_UNIX)
        self.listening.bind(str(path))
        self.listening.listen(16)
        self.address_fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        path.unlink()

    def close(self) -> None:
        self.listening.close()
        os.close(self.address_fd)


@pytest.fixture
def new_endpoint() -> Iterator[Callable[[], Endpoint]]:
    """Makes them."""
    made: list[Endpoint] = []

    def make() -> Endpoint:
        with tempfile.TemporaryDirectory(prefix="vecd-test-") as folder:  # short: a socket's path has 107 bytes
            made.append(Endpoint(Path(folder)))
        return made[-1]

    yield make
    for endpoint in made:
        endpoint.close()


@pytest.fixture
def endpoint(new_endpoint: Callable[[], Endpoint]) -> Endpoint:
    return new_endpoint()


@pytest.fixture
def gateway(endpoint: Endpoint) -> Iterator[FakeGateway]:
    made = FakeGateway(endpoint)
    yield made
    made.close()


def as_message(batch: PackedBatch, *, number: int = 1, slot: int = 0, epoch: int = 1, num_threads: int = 0) -> Batch:
    """A batch as the gateway sends it."""
    return Batch(
        epoch=epoch,
        number=number,
        slot=slot,
        num_sequences=batch.lengths.size,
        num_tokens=batch.token_ids.size,
        lengths_bytes=batch.lengths.tobytes(),
        token_ids_bytes=batch.token_ids.tobytes(),
        outputs_bytes=b"" if batch.outputs is None else batch.outputs.tobytes(),
        num_threads=num_threads,
    )
