"""What the name of a model means, where several are served."""

import logging
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.support.asking import PLAIN
from vecd.gateway.api.model_info import ModelInfo
from vecd.gateway.api.models import Models, header_value, readings_of
from vecd.gateway.types.config import AliasDefaults
from vecd.gateway.types.errors import ModelNotFound, Unavailable


@dataclass
class Served:
    model_info: ModelInfo

    @property
    def name(self) -> str:
        return self.model_info.model


def served(model: str, *capabilities: str, **changes: Any) -> Served:
    return Served(replace(PLAIN, model=model, capabilities=capabilities or ("dense",), **changes))


MINILM = served(
    "minilm",
    aliases=("text-embedding-3-small", "Mini"),
    prompts={"query": "query: "},
    folder_name="all-MiniLM-L6-v2",
)
BGE = served("BAAI/bge-m3", "dense", "sparse", folder_name="model")
RANKER = served("ranker", "rerank", folder_name="model")
TAGGED = served("nomic:query", folder_name="x")
ALL = (MINILM, BGE, RANKER, TAGGED)


def models(*, refuses_unknown: bool = False, **options: Any) -> Models[Served]:
    return Models(ALL, refuses_unknown=refuses_unknown, **options)


@pytest.mark.parametrize(
    ("name", "expected", "own"),
    [
        ("minilm", MINILM, "minilm"),
        ("Mini", MINILM, "Mini"),
        ("text-embedding-3-small", MINILM, "text-embedding-3-small"),
        ("all-MiniLM-L6-v2", MINILM, "minilm"),
        ("ALL-minilm-l6-V2", MINILM, "minilm"),
        ("MiniLM", MINILM, "minilm"),
        ("sentence-transformers/MiniLM", MINILM, "minilm"),
        ("minilm:latest", MINILM, "minilm:latest"),
        ("Mini:latest", MINILM, "Mini:latest"),
        ("minilm:query", MINILM, "minilm:query"),
        ("MINILM:query", MINILM, "minilm:query"),
        ("minilm:qurey", MINILM, "minilm:qurey"),
        ("minilm:v1.5", MINILM, "minilm:v1.5"),
        ("BAAI/bge-m3", BGE, "BAAI/bge-m3"),
        ("baai/BGE-M3", BGE, "BAAI/bge-m3"),
        ("bge-m3", BGE, "BAAI/bge-m3"),
        ("bge-m3:latest", BGE, "BAAI/bge-m3:latest"),
        ("nomic:query", TAGGED, "nomic:query"),
        ("nomic:query:query", TAGGED, "nomic:query:query"),
    ],
)
def test_a_name_that_is_known(name, expected, own):
    assert models().own_name(expected, name) == own
    assert models().find(name) is expected


@pytest.mark.parametrize(
    "name",
    [
        "",
        "model",  # the folder of two models
        "other/bge-m3",  # another organization's
        "nomic",
        "../minilm",
        "../../etc/passwd",
        "minilm/..",
        "/minilm/model.safetensors",
        "https://example.com/a.bin",
        "https://example.com/bge-m3",
        "https:/minilm/",
        "minilm\0",
        "x" * 2**20,
        "minilm:" + "x" * 2**20,
        "🙂",
        "\ud800",
    ],
)
def test_a_name_that_is_unknown(name):
    assert models().find(name) is None
    assert models().choose(name, ("dense",)) is MINILM
    assert models().own_name(BGE, name) == "BAAI/bge-m3"


def test_an_alias_with_request_defaults_finds_its_model_with_them():
    defaults = AliasDefaults("Mini", prompt="x")
    info = replace(MINILM.model_info, alias_defaults=(defaults,))
    plain, seen = Served(info), Served(info.by_alias(defaults))
    known = Models((plain, BGE), refuses_unknown=True, by_alias=(seen,))
    for name in ("Mini", "mini", "Mini:latest", "org/MINI", "Mini:query"):
        assert known.find(name) is seen
        assert known.as_named(plain, name) is seen
    assert known.own_name(seen, "mini") == "Mini"
    assert known.own_name(seen, "MINI:query") == "minilm:query"
    for name in ("minilm", "text-embedding-3-small", "all-MiniLM-L6-v2"):
        assert known.find(name) is plain
    assert known.as_named(BGE, "Mini") is BGE
    assert known.all == (plain, BGE)
    assert (known.have_defaults, models().have_defaults) == (True, False)


def test_exact_names_come_first():
    upper, lower = served("E5"), served("e5", aliases=("large",))
    other = served("large", folder_name="E5")
    found = Models((upper, lower, other), refuses_unknown=False)
    assert [found.find(name) for name in ("E5", "e5", "large")] == [upper, lower, other]
    assert found.find("e5 ") is None
    dotted, plain = served("İ5", aliases=("É",)), served("x")
    assert Models((dotted, plain), refuses_unknown=False).find("é") is dotted


def test_a_name_in_other_letters_that_two_models_have_finds_none():
    assert Models((served("E5a"), served("e5A")), refuses_unknown=False).find("E5A") is None
    pair = Models((served("a/Ranker"), served("b/ranker")), refuses_unknown=False)
    assert pair.find("ranker") is None
    assert pair.find("B/RANKER") is pair.all[1]


@pytest.mark.parametrize(
    ("needs", "expected"),
    [
        ((), MINILM),
        (("dense",), MINILM),
        (("sparse", "multi-vector"), BGE),
        (("classify", "rerank"), RANKER),
        (("rerank", "dense"), RANKER),
        (("sparse", "dense"), BGE),
        (("classify",), MINILM),  # none can: the first says so
    ],
)
def test_the_default_of_a_kind_is_the_first_that_can(needs, expected):
    assert models().choose(None, needs) is expected
    assert models().choose("", needs) is expected
    assert models().choose("gpt-4", needs) is expected
    assert models(refuses_unknown=True).choose(None, needs) is expected


def test_a_known_name_is_never_replaced_by_one_that_can():
    assert models().choose("ranker", ("dense",)) is RANKER


def test_an_unknown_name_is_refused_with_the_names_of_those_that_can():
    refusing = models(refuses_unknown=True)
    with pytest.raises(ModelNotFound, match=r"The model `gpt-4` does not exist; this server has 'ranker'$"):
        refusing.choose("gpt-4", ("rerank",))
    with pytest.raises(ModelNotFound, match="'minilm', 'text-embedding-3-small', 'Mini', 'BAAI/bge-m3', 'ranker'"):
        refusing.choose("gpt-4", ())
    with pytest.raises(ModelNotFound) as raised:
        refusing.choose("x" * 2**20, ("classify",))
    assert "`" + "x" * 64 + "`" in raised.value.message
    assert len(raised.value.message) < 300
    assert refusing.find("minilm:query") is MINILM
    assert refusing.find("minilm:latest") is MINILM
    assert refusing.find("minilm:v1.5") is None, "as of one model, whose names are checked"


def test_while_models_are_still_to_come_no_other_answers_for_them():
    incomplete = Models(ALL[:1], refuses_unknown=False, is_complete=False)
    assert incomplete.choose("minilm", ("dense",)) is MINILM
    for name in ("ranker", "", None):
        with pytest.raises(Unavailable) as raised:
            incomplete.choose(name, ("dense",))
        assert (raised.value.code, raised.value.headers) == ("not_ready", {"retry-after": "1"})


def test_that_a_model_answers_for_others_is_logged_once_without_their_names(caplog):
    logged: set[str] = set()
    with caplog.at_level(logging.INFO, "vecd.gateway"):
        for _ in range(3):
            models(logged=logged).choose("gpt-4\n" + "x" * 2**20, ("rerank",))
            models(logged=logged).choose("ranker", ("rerank",))
        [record] = caplog.records
        assert "ranker answers" in record.message
        assert "gpt" not in record.message


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/m/minilm/v1/embeddings", ("minilm", "/v1/embeddings")),
        ("/m/minilm:query/embed", ("minilm:query", "/embed")),
        ("/m/MiniLM/", ("MiniLM", "/")),
        ("/m/minilm", ("minilm", "/")),
        ("/m/minilm//embed", ("minilm", "//embed")),
        ("/m/BAAI/bge-m3/v1/embeddings", ("BAAI/bge-m3", "/v1/embeddings")),
        ("/m/bge-m3/v1/embeddings", ("bge-m3", "/v1/embeddings")),
        ("/m/minilm/ranker", ("minilm", "/ranker")),
        ("/m/org/minilm/embed", ("org/minilm", "/embed")),
        ("/m/gpt-4/v1/embeddings", None),
        ("/m/../minilm/embed", None),
        ("/m/" + "/x" * 2000 + "/minilm/embed", None),
        ("/m/", None),
        ("/m//embed", None),
    ],
)
def test_the_name_in_a_path(path, expected):
    assert models().split(path) == expected


def test_the_longest_of_the_names_as_they_are_configured():
    found = Models((served("a"), served("a/embed")), refuses_unknown=False)
    assert found.split("/m/a/embed/embed") == ("a/embed", "/embed")
    assert found.split("/m/a/v1/embed") == ("a", "/v1/embed")
    assert found.split("/m/A/embed/embed") == ("A", "/embed/embed")


def test_all_readings_of_a_path():
    assert readings_of("/m/a/b/c") == [("a", "/b/c"), ("a/b", "/c"), ("a/b/c", "/")]


def test_a_name_in_a_header_is_in_ascii():
    assert header_value("BAAI/bge-m3:query") == "BAAI/bge-m3:query"
    assert header_value("é\r\nx: y") == "%C3%A9%0D%0Ax%3A%20y"
