"""What is published about models by name, where their files do not say it.

Owns the table of such facts, and what counts as a name of a model. Reads no file. Called by `vecd.shm.card`, and by
`vecd.launch.check.model` for the remedy of a model that is refused.

Sources: the model cards on the Hugging Face hub, and jina.ai/models.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Published:
    matryoshka_dims: tuple[int, ...] | None = None
    """The lengths that the model's vectors may be cut to, some longer than its smaller variants' vectors; empty: any
    length; None: nothing is published."""
    instead: str = ""
    """The copy of the model that vecd serves, of one that is Python code or adapters; may be empty."""


_UP_TO_1024 = (32, 64, 128, 256, 512, 768, 1024)
_TABLE = (
    (r"qwen3-embedding-[\d.]+b", Published(())),
    (r"embeddinggemma-300m", Published((128, 256, 512, 768))),
    (r"nomic-embed-text-v1\.5", Published((64, 128, 256, 512, 768))),
    (r"modernbert-embed-base", Published((256, 768))),
    (r"mxbai-embed-large-v1", Published(())),
    (r"snowflake-arctic-embed-(m-v1\.5|[ml]-v2\.0)", Published((256,))),
    (r"jina-embeddings-v3", Published(_UP_TO_1024, "jinaai/jina-embeddings-v3-hf")),
    (r"jina-embeddings-v3-hf|jina-embeddings-v5-text-(small|nano)-\w.*", Published(_UP_TO_1024)),
    (r"jina-embeddings-v5-text-small", Published(_UP_TO_1024, "jinaai/jina-embeddings-v5-text-small-retrieval")),
    (r"static-(retrieval-mrl-en|similarity-mrl-multilingual)-v1", Published((32, 64, 128, 256, 512, 1024))),
    (r"potion-[\w-]+", Published(())),
)
"""By the whole name, without the owner and in lower case."""


def names_of(folder: Path, config: Mapping[str, Any]) -> str:
    """What names the model: its folder, and config.json itself. In the hub's cache the name is two folders above the
    files; what is further up names other things."""
    return f"{'/'.join(folder.parts[-3:])} {config.get('_name_or_path', '')}"


def published(names: str) -> Published:
    """What is published about the model with these `names_of` it."""
    parts = re.split(r"/|--|\s", names.lower())
    found = (facts for pattern, facts in _TABLE if any(re.fullmatch(pattern, part) for part in parts))
    return next(found, Published())
