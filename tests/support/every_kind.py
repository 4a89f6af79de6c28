"""One server with a small model of each kind, which all tests of a run share that only send requests.

A model more costs a worker, and no start. The reference vectors are computed here, by a process that has torch to make
the models with: those of the server need none.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, StaticEmbedding
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.support import tiny_tokenizers
from tests.support.checkpoints import HIDDEN_SIZE, Checkpoints, worker_config
from tests.support.multi_vector_checkpoints import save_bge_m3, save_pylate
from tests.support.score_checkpoints import save_classifier
from tests.support.serving import RunningServer, bundled_model, cache_folder
from tests.support.several_models import model_of, shared_folder
from tests.support.shared_servers import shared_server
from tests.support.sparse_checkpoints import save_splade
from vecd.workers.select import compute_reference

TOKEN_DIM = 384
"""Of the model "pylate", so that a request of 2,000 texts has more than 8 million numbers."""
PROMPTS = {"query": "query: ", "document": "passage: "}
"""Of the model "prompted"."""
DEFAULT_PROMPT = "w50 w51 w52 w53 : "
"""Of the models "default-prompt" and "query-prompt", for queries."""


def widening_steps() -> list[torch.nn.Module]:
    """As EmbeddingGemma and GTR have them."""
    torch.manual_seed(1)
    identity = torch.nn.Identity()
    return [
        Dense(HIDDEN_SIZE, 64, bias=False, activation_function=identity),
        Dense(64, 24, bias=False, activation_function=identity),
        Normalize(),
    ]


def _dense(folder: Path, **settings: Any) -> Path:
    return Checkpoints(lambda name: _made(folder / name))("bert", **settings)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _save_query_prompt(folder: Path) -> Path:
    """As published checkpoints have it; this version of sentence-transformers writes a prompt of documents, too."""
    saved = _dense(folder, prompts={"query": DEFAULT_PROMPT})
    path = saved / "config_sentence_transformers.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "prompts": {"query": DEFAULT_PROMPT}}))
    return saved


def _save_word_pieces(folder: Path) -> Path:
    labels = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    save_classifier(folder, labels=labels, is_of_tokens=True, vocab_size=300, pad_token_id=0)
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "pad", "cls", "sep", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizers.bert(), model_max_length=60, **special).save_pretrained(
        folder
    )
    return folder


def _save_static(folder: Path) -> Path:
    tokenizer = Tokenizer.from_file(str(bundled_model() / "tokenizer.json"))
    tokenizer.no_truncation()
    table = StaticEmbedding(tokenizer, torch.randn(30522, 64, generator=torch.Generator().manual_seed(0)))
    SentenceTransformer(modules=[table, Normalize()], device="cpu").save(str(folder))
    return folder


_SAVE: dict[str, Callable[[Path], Path]] = {
    "scores": save_classifier,
    "labels": lambda folder: save_classifier(folder, labels=["no", "maybe", "yes"]),
    "entities": lambda folder: save_classifier(folder, labels=["O", "B-PER", "I-PER", "B-LOC"], is_of_tokens=True),
    "word-pieces": _save_word_pieces,
    "splade": save_splade,
    "pylate": lambda folder: save_pylate(folder, "bert", token_dim=TOKEN_DIM),
    "m3": save_bge_m3,
    "static": _save_static,
    "cls": lambda folder: _dense(folder, pooling="cls"),
    "long": lambda folder: _dense(folder, max_tokens=3000, max_position_embeddings=3000),
    "default-prompt": lambda folder: _dense(
        folder, prompts={"query": DEFAULT_PROMPT, "document": "w60 "}, steps=widening_steps()
    ),
    "query-prompt": _save_query_prompt,
}


@cache
def folders() -> dict[str, Path]:
    """Of the models, by name. The first process of a run that asks makes them."""
    folder = shared_folder("every-kind", _save_all)
    return {name: Path(saved) for name, saved in json.loads((folder / "saved.json").read_text()).items()}


def _save_all(folder: Path) -> None:
    made = {name: save(folder / name) for name, save in _SAVE.items()}
    for name in made.keys() - {"static"}:
        remember_reference(made[name])
    (folder / "saved.json").write_text(json.dumps({name: str(saved) for name, saved in made.items()}))


def remember_reference(folder: Path) -> Path:
    """Compute the reference vectors of a model for the servers of this run, none of which imports torch for it then.
    Returns `folder`."""
    torch.set_num_threads(1)
    compute_reference(worker_config(folder, cache_dir=Path(cache_folder())))
    return folder


def served(name: str) -> RunningServer:
    """The server, with the paths of one model."""
    return model_of(every_kind_server(), name)


def every_kind_server() -> RunningServer:
    """In float32. The model "prompted" is the bundled one, with prompts and shorter vectors."""
    prompts = ", ".join(f'{role} = "{prompt}"' for role, prompt in PROMPTS.items())
    tables = [f'[models.{each}]\nsource = "{folder}"\n' for each, folder in folders().items()]
    tables.append(f'[models.prompted]\nsource = "{bundled_model()}"\nmatryoshka = true\nprompts = {{ {prompts} }}\n')
    config = Path(cache_folder(), "every-kind.toml")
    if not config.exists():
        config.write_text("\n".join(tables))
    return shared_server("--dtype", "float32", "--workers", "1", "--config", str(config))
