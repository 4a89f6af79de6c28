"""Which modules of a Router a text goes through, by what it is for."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.model_folders import ModelFolder as Files
from tests.support.model_folders import write_header
from vecd.model.card import ModelCard, ModelError, card_of
from vecd.model.folder import ModelFolder

LIBRARY = "sentence_transformers.models"
ROUTES = {"query": ["query_0_StaticEmbedding"], "document": ["document_0_Transformer", "document_1_Pooling"]}


class Router(Files):
    def __init__(self, path: Path, routes: Any = None, **parameters: Any) -> None:
        super().__init__(path)
        routes = ROUTES if routes is None else routes
        names = {name for chain in routes.values() for name in chain}
        types = {name: f"{LIBRARY}.{name.rpartition('_')[2]}" for name in names}
        self.write("modules.json", [{"idx": 0, "name": "0", "path": "", "type": f"{LIBRARY}.Router"}])
        self.write("router_config.json", {"types": types, "structure": routes, "parameters": parameters})
        self.write("config_sentence_transformers.json", {"prompts": {"query": "q: ", "document": "d: "}})
        tokenizer = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": []}
        for name in names:
            self.write(f"{name}/config.json", {"pooling_mode": "cls"})
            if name.endswith(("StaticEmbedding", "Transformer")):
                self.write(f"{name}/tokenizer.json", tokenizer)
            if name.endswith("StaticEmbedding"):
                write_header(self.path / name / "model.safetensors", {"embedding.weight": [2, 8]})
            if name.endswith("Transformer"):
                sizes = {"hidden_size": 8, "vocab_size": 2, "max_position_embeddings": 64}
                self.write(f"{name}/config.json", {"model_type": "bert", "architectures": ["BertModel"], **sizes})
                write_header(self.path / name / "model.safetensors", {})

    def of(self, task: str = "") -> tuple[ModelCard, str | None]:
        folder = ModelFolder(self.path, task=task)
        return card_of(folder), folder.role

    def refused(self, task: str = "") -> str:
        with pytest.raises(ModelError) as error:
            self.of(task)
        assert "\n" not in str(error.value)
        return str(error.value).removeprefix(f"{self.path}/")


def test_each_role_is_a_model(tmp_path: Path) -> None:
    router = Router(tmp_path, default_route="document")
    query, role = router.of("query")
    assert (query.is_static, query.prompt, role) == (True, "q: ", "query")
    assert query.weights_folder.endswith("/query_0_StaticEmbedding")
    document, role = router.of("document")
    assert (document.model_type, document.pooling, document.prompt, role) == ("bert", ("cls",), "d: ", "document")
    plain, role = router.of()
    assert (plain.weights_folder, plain.prompt, role) == (document.weights_folder, "", "document")
    assert "there is no route for 'clustering'; there are query, document" in router.refused("clustering")


@pytest.mark.parametrize(
    ("parameters", "is_static"),
    [
        ({}, True),
        ({"default_route": "document"}, False),
        ({"default_route": "query"}, True),
        ({"default_route": "query", "route_mappings": {"(None, 'text')": "document"}}, False),
        ({"default_route": "query", "route_mappings": {"(None, None)": "document"}}, False),
        ({"default_route": "query", "route_mappings": {"(None, 'image')": "document"}}, True),
    ],
)
def test_the_default_route_is_sentence_transformers(parameters: Any, is_static: bool, tmp_path: Path) -> None:
    assert Router(tmp_path, **parameters).of()[0].is_static is is_static


@pytest.mark.parametrize(
    ("key", "is_static"),
    [("('query', 'text')", False), ("('query', None)", False), ("('document', 'text')", True)],
)
def test_mappings_come_before_names(key: str, is_static: bool, tmp_path: Path) -> None:
    router = Router(tmp_path, default_route="document", route_mappings={key: "document"})
    assert router.of("query")[0].is_static is is_static
    assert router.of()[1] == ("document" if is_static else None)


def test_one_chain_for_both_is_one_model(tmp_path: Path) -> None:
    chain = ROUTES["document"]
    card, role = Router(tmp_path, {"query": chain, "document": chain}).of()
    assert (card.model_type, role) == ("bert", None)
    by_modality = Router(tmp_path / "text", {"text": chain})
    assert by_modality.of()[1] is None


def test_what_cannot_be_served_is_named(tmp_path: Path) -> None:
    router = Router(tmp_path, allow_empty_key=False)
    assert "there is no route where the model's name has none behind it, as in NAME/query" in router.refused()
    router.change("router_config.json", structure={})
    assert "structure must have modules for each route" in router.refused("query")
    router.change("router_config.json", structure=ROUTES, types={})
    assert "router_config.json: cannot be read: KeyError" in router.refused("query")
    types = dict.fromkeys((*ROUTES["query"], *ROUTES["document"]), "custom_st.Transformer")
    router.change("router_config.json", types=types)
    assert "module custom_st.Transformer is not sentence-transformers' own" in router.refused("query")
