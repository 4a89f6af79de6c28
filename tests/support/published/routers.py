"""Models with other modules for queries than for documents, as sentence-transformers saves a Router.

Their names have the role behind the hub id: each is a model of its own to the server.
"""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Router, StaticEmbedding

from tests.support.published import Layout, RowsOf
from tests.support.published.usual import WIDTH, save_dense

QUERY = "Represent this sentence for searching relevant passages: "
LEAF, STATIC, SHARED = "MongoDB/mdbr-leaf-ir-asym", "a-lab/static-queries", "a-lab/one-transformer"


def _parts_of(family: str, pooling: str, **settings: Any) -> list[Any]:
    """Of a model that is saved for a moment, with longer texts than are usual here, for its prompts."""
    place = Path(tempfile.mkdtemp())
    save_dense(place, family, "bert", pooling, is_normalized=False, max_tokens=96, **settings)
    modules = list(SentenceTransformer(str(place), device="cpu", local_files_only=True))
    shutil.rmtree(place)
    return modules


PROMPTS = {"query": QUERY, "document": ""}


def _save(folder: Path, router: Router, *behind: Any) -> None:
    SentenceTransformer(modules=[router, *behind], prompts=PROMPTS, device="cpu").save(str(folder))


def _dense() -> Dense:
    torch.manual_seed(5)
    return Dense(WIDTH, WIDTH, activation_function=torch.nn.Identity())


def save_leaf(folder: Path) -> None:
    """A small encoder with a Dense for queries, a larger one for documents."""
    query = [*_parts_of("bert", "mean_tokens", num_hidden_layers=1), _dense(), Normalize()]
    document = [*_parts_of("bert", "cls_token", num_hidden_layers=3), Normalize()]
    _save(folder, Router.for_query_document(query, document))


def save_static(folder: Path) -> None:
    document = _parts_of("bert", "cls_token")
    torch.manual_seed(6)
    table = torch.randn(document[0].tokenizer.vocab_size, WIDTH).numpy()
    query: list[Any] = [StaticEmbedding(document[0].tokenizer.backend_tokenizer, embedding_weights=table)]
    _save(folder, Router.for_query_document(query, document), Normalize())


def save_shared(folder: Path) -> None:
    """One transformer and pooling, and a Dense behind them for queries; the routes have names of their own."""
    document = _parts_of("bert", "mean_tokens")
    mappings: Any = {("query", "text"): "short", ("document", None): "long"}
    router = Router({"short": [*document, _dense()], "long": document}, allow_empty_key=False, route_mappings=mappings)
    _save(folder, router, Normalize())


def reference_for(task: str) -> Callable[[Path], RowsOf]:
    def load(folder: Path) -> RowsOf:
        model: Any = SentenceTransformer(
            str(folder), device="cpu", local_files_only=True, model_kwargs={"dtype": torch.float32}
        ).eval()

        def rows(ids: NDArray[np.int64], border: int) -> NDArray[np.float32]:
            router, *behind = model
            token_ids = torch.from_numpy(np.asarray(ids, np.int64))[None]
            features: Any = {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids)}
            with torch.inference_mode():
                if isinstance(router.sub_modules[router._resolve_route(task, "text")][0], StaticEmbedding):
                    known = token_ids[0][token_ids[0] < router.tokenizer.get_vocab_size()]  # the engine has one more
                    features = {"input_ids": known, "offsets": torch.tensor([0])}
                features = router(features, task=task, modality="text")
                for module in behind:
                    features = module(features)
            vector: NDArray[np.float32] = features["sentence_embedding"][0].numpy()
            return vector

        return rows

    return load


LAYOUTS: tuple[Layout, ...] = tuple(
    Layout(
        f"{name}/{task}",
        save,
        reference_for(task),
        f"router {name} {task}",
        path=path,
        prompts={"": PROMPTS[task], task: PROMPTS[task]},
    )
    for name, save, paths in (
        (LEAF, save_leaf, {"query": "lean", "document": "lean"}),
        (STATIC, save_static, {"query": "static", "document": "lean"}),
        (SHARED, save_shared, {"query": "lean", "document": "lean"}),
    )
    for task, path in paths.items()
)
