"""A query and a document are embedded as sentence-transformers' `encode_query` and `encode_document` embed them."""

import json
import shutil
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer

from tests.support.checkpoints import Checkpoints, assert_same_vectors
from tests.support.serving import exact_server

TEXTS = ["w2 w3", "w9", "w7 w8 unknown w9"]
PROMPT = "w50 w51 w52 w53 : "
CONFIG = "config_sentence_transformers.json"


def test_a_document_does_not_get_the_default_prompt_that_is_the_query_s(
    checkpoint: Checkpoints, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("bert", prompts={"query": PROMPT}), folder)
    config = json.loads((folder / CONFIG).read_text())
    assert config["default_prompt_name"] == "query"
    # As published checkpoints have them; this version of sentence-transformers writes an empty one for documents, too.
    (folder / CONFIG).write_text(json.dumps({**config, "prompts": {"query": PROMPT}}))
    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    queries, documents = model.encode_query(TEXTS), model.encode_document(TEXTS)
    assert np.abs(queries - documents).max(axis=1).min() > 1e-2
    assert np.abs(model.encode(TEXTS) - queries).max() == 0
    with exact_server(str(folder), "--workers", "1") as server:
        assert_same_vectors(np.array(server.embed(TEXTS), np.float32), queries)
        assert_same_vectors(np.array(server.embed(TEXTS, input_type="search_query"), np.float32), queries)
        for asked in ({"input_type": "search_document"}, {"task": "retrieval.passage"}, {"model": "any:document"}):
            assert_same_vectors(np.array(server.embed(TEXTS, **asked), np.float32), documents)
