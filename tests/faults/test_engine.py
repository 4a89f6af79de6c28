"""A model that gives what is not a vector."""

import json
import shutil

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from serving import exact_server
from tokenizers import Tokenizer


@pytest.fixture(scope="module")
def sick_model(minilm_folder, tmp_path_factory):
    """all-MiniLM-L6-v2 whose embedding of the word "zebra" is not a number."""
    folder = tmp_path_factory.mktemp("model") / "sick"
    shutil.copytree(minilm_folder, folder)
    weights = load_file(folder / "model.safetensors")
    word = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("zebra")
    embeddings = weights["embeddings.word_embeddings.weight"].copy()
    embeddings[word] = np.nan
    save_file(
        {**weights, "embeddings.word_embeddings.weight": embeddings}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def test_nan_fails_its_own_request_and_no_other(sick_model, reference):
    with exact_server(str(sick_model), "--workers", "1") as server:
        with httpx.Client(timeout=60) as http:
            answer = http.post(f"{server.url}/v1/embeddings", json={"input": ["a horse", "a zebra"]})
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert (error["type"], error["code"]) == ("server_error", "not_finite")
        assert "input[1]" in error["message"]
        assert "zebra" not in json.dumps(error) + server.stderr
        assert np.abs(np.array(server.embed("a horse")) - reference(["a horse"])).max() < 1e-5
