"""Files of a served model are overwritten, and then its folder goes: whatever dies, the loaded model answers, and the
change is told."""

import json
import re
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import save_file

from tests.support.checkpoints import VOCAB_SIZE
from tests.support.every_kind import remember_reference
from tests.support.serving import Server, eventually, exact_server
from tests.support.sparse_checkpoints import save_splade
from vecd.model.card import read_card

TEXTS = [" ".join(f"w{(7 * n + k * k) % (VOCAB_SIZE - 4)}" for k in range(6)) for n in range(12)]
TOLD_WITHIN_S = 5.0


def answers(client: httpx.Client) -> list[Any]:
    """The weights of documents, by workers, and of queries, by the gateway alone; with the model's identity."""
    found = []
    for role in ("document", "query"):
        fields = {"input": TEXTS, "output": "sparse", "input_type": role}
        response = client.post("/v1/embeddings", json=fields).raise_for_status()
        found += [response.headers["x-vecd-identity"], [item["sparse"] for item in response.json()["data"]]]
    return found


def overwrite(folder: Path) -> None:
    """With `cp`: the vocabulary in another order, and other weights of queries."""
    path = Path(read_card(folder).tokenizer_file)
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = dict(zip(words, reversed(words.values()), strict=True))
    (other := folder.parent / "other").mkdir()
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    save_file({"weight": torch.rand(VOCAB_SIZE) + 1}, other / "model.safetensors")
    shutil.copyfile(other / "tokenizer.json", path)  # as cp does: the same inode
    [weights] = folder.glob("query_*/model.safetensors")
    shutil.copyfile(other / "model.safetensors", weights)


def files_of(client: httpx.Client) -> tuple[str, float]:
    """As /health and /metrics tell them."""
    health = client.get("/health").raise_for_status().json()
    [changed] = re.findall(r"^vecd_model_files_changed\{.*\} (.*)$", client.get("/metrics").text, re.MULTILINE)
    return health["model_files"], float(changed)


def kill_gateways(server: Server, expected: list[Any], *indices: int) -> None:
    """One after the other; the one that comes in its place answers as before."""
    for index in indices:
        (killed := server.gateways()[index]).kill()
        eventually(partial(is_replaced, server, index, killed.pid))
        with server.client_of(index) as client:
            eventually(partial(is_told, client))
            assert answers(client) == expected


def is_replaced(server: Server, index: int, pid: int) -> bool:
    found = server.gateways().get(index)
    return found is not None and found.pid != pid


def is_told(client: httpx.Client) -> bool:
    return client.get("/health").status_code == 200 and files_of(client)[1] == 1


def are_both_told(client: httpx.Client) -> bool:
    told, _ = files_of(client)
    return is_told(client) and "tokenizer.json has changed" in told and "model.safetensors has changed" in told


def has_identity(client: httpx.Client) -> bool:
    return "x-vecd-identity" in client.post("/v1/embeddings", json={"input": "w1"}).headers


def test_overwritten_files_change_no_answer_and_are_told(tmp_path: Path) -> None:
    weights = torch.rand(VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) + 0.1
    folder = remember_reference(save_splade(tmp_path, query_weights=weights))
    with exact_server(str(folder), "--workers", "1", "--gateways", "2") as server:
        with server.client_of(0) as client, server.client_of(1) as other:
            for each in (client, other):
                eventually(partial(has_identity, each))
                assert files_of(each) == ("as loaded", 0)
            expected = answers(client)
            overwrite(folder)
            began_at = time.monotonic()
            for each in (client, other):
                # The files may have been looked at between the two copies.
                eventually(partial(are_both_told, each), TOLD_WITHIN_S)
                assert answers(each) == expected
            assert time.monotonic() - began_at < TOLD_WITHIN_S
            line = rf"files of splade in {folder} are not as loaded: (?=.*tokenizer\.json).*model\.safetensors"
            assert len(re.findall(line, server.stderr)) == 1
        kill_gateways(server, expected, 0, 1)

        folder.rename(tmp_path / "gone")
        missing = "the model's folder is missing"
        with server.client_of(0) as client:
            eventually(lambda: files_of(client)[0] == missing, TOLD_WITHIN_S)
            assert missing in server.stderr
            server.workers()[0].kill()
            eventually(lambda: [worker["life"] for worker in server.info()["workers"]] == [2])
            assert answers(client) == expected
        kill_gateways(server, expected, 0)
