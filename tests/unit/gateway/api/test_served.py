"""A model as dialects see it: the names, prompts and sizes of one, and what a name means where several are served."""

import logging
from typing import Any

import pytest

from tests.support.asking import PLAIN, changed
from vecd.gateway.api.served import PURPOSES, ModelInfo, Models, header_value, log_stand_in
from vecd.gateway.config import AliasDefaults
from vecd.gateway.errors import BadRequest, ModelNotFound, Unavailable

E5 = changed(PLAIN, model="e5", aliases=("org/e5",), prompts={"query": "query: ", "passage": "passage: "})
NOMIC = changed(
    PLAIN, model="nomic-embed-text", prompts={"search_query": "search_query: ", "clustering": "clustering: "}
)


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        (None, None),
        ("", None),
        ("org/e5", None),
        ("anything", None),
        ("e5:query", "query: "),
        ("other:query", "query: "),
        ("e5:search_document", "passage: "),
        ("e5:classification", None),
        ("nomic-embed-text:v1.5", None),
        ("other:query2", None),
        ("e5:335m-v1-fp16", None),
        ("e5:q8_0", None),
        ("e5:bf16", None),
        ("e5:int8", None),
        ("a:b:query", "query: "),
    ],
)
def test_a_models_name_may_ask_for_a_prompt(name, prompt):
    assert E5.prompt_of_model_name(name) == prompt


def test_a_name_with_a_colon_may_be_the_models_own():
    model_info = changed(E5, model="mxbai:query", aliases=("all-minilm:document",))
    assert model_info.prompt_of_model_name("mxbai:query") is None
    assert model_info.prompt_of_model_name("all-minilm:document") is None
    assert model_info.prompt_of_model_name("mxbai:query:document") == "passage: "


@pytest.mark.parametrize("name", ["e5:qeury", "org/e5:querry", "e5:", "e5:Query", "e5:" + "x" * 500])
def test_a_prompts_name_with_a_mistake_in_it_is_told(name):
    with pytest.raises(BadRequest, match=r"'model': the model has no prompt .*; it has 'query', 'passage'") as caught:
        E5.prompt_of_model_name(name)
    assert (caught.value.status, caught.value.param) == (400, "model")
    assert len(caught.value.message) < 200
    assert PLAIN.prompt_of_model_name(name.replace("org/e5", "minilm").replace("e5", "minilm")) is None  # it has none


@pytest.mark.parametrize("name", ["gpt", "", "E5", "other:query", "e5:v2", ":query", "query"])
def test_other_models_are_not_found_where_names_matter(name):
    with pytest.raises(ModelNotFound) as caught:
        changed(E5, unknown_model="refuse").prompt_of_model_name(name)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")
    assert caught.value.message == f"The model `{name}` does not exist; this server has 'e5', 'org/e5'"


@pytest.mark.parametrize("name", [None, "e5", "org/e5", "e5:query", "org/e5:passage", "e5:latest"])
def test_the_models_own_names_are_found_where_they_matter(name):
    assert changed(E5, unknown_model="refuse").prompt_of_model_name(name) == E5.prompt_of_model_name(name)


@pytest.mark.parametrize(
    ("purpose", "of_e5", "of_nomic"),
    [
        ("query", "query: ", "search_query: "),
        ("document", "passage: ", None),
        ("clustering", None, "clustering: "),
        ("code.query", "query: ", "search_query: "),
        ("text-matching", None, None),
    ],
)
def test_a_purpose_is_a_prompt_by_another_name(purpose, of_e5, of_nomic):
    assert (E5.prompt_for(purpose), NOMIC.prompt_for(purpose)) == (of_e5, of_nomic)
    assert PLAIN.prompt_for(purpose) is None


@pytest.mark.parametrize(
    ("own", "purpose"), [("query", "document"), ("query", "code.passage"), ("document", "search_query")]
)
def test_a_purpose_does_not_get_the_default_prompt_which_may_be_another_s(own, purpose):
    model_info = changed(E5, prompts={own: "own: "}, prompt="own: ")
    assert model_info.prompt_for(purpose) == ""
    assert model_info.prompt_of_model_name(f"e5:{purpose}") == ""
    assert (model_info.prompt_for(own), model_info.prompt_for("classification")) == ("own: ", None)


def test_no_purpose_is_without_its_own_prompt():
    for purpose in PURPOSES:
        model_info = changed(PLAIN, prompts={**dict.fromkeys(PURPOSES, "other: "), purpose: "own: "})
        assert model_info.prompt_for(purpose) == "own: "


def test_a_purpose_that_nobody_knows_is_refused():
    many = changed(PLAIN, prompts={f"prompt number {n} {'x' * 100}": "p" for n in range(100)})
    for model_info in (E5, PLAIN, many):
        with pytest.raises(BadRequest, match=r"'task' must be one of .*, is 'poems'") as caught:
            model_info.prompt_for("poems", "task")
        assert caught.value.param == "task"
        assert len(caught.value.message) < 1000


def test_a_model_that_leaves_prompts_out_of_its_pooling_takes_none():
    model_info = changed(E5, pools_prompt=False)
    for ask in (
        lambda: model_info.prompt_named("query", "prompt_name"),
        lambda: model_info.prompt_for("query", "prompt_name"),
        lambda: model_info.checked("x: ", "prompt_name"),
    ):
        with pytest.raises(BadRequest, match="'prompt_name': this model leaves prompts out") as caught:
            ask()
        assert caught.value.param == "prompt_name"
    with pytest.raises(BadRequest) as caught:
        model_info.prompt_of_model_name("e5:query")
    assert caught.value.param == "model"
    assert (model_info.checked("", "prompt"), model_info.prompt_for("clustering")) == ("", None)


ONE_OF, ALLOWS_ANY = "'d' must be one of", "(--matryoshka allows any)"
NO_DIMENSIONS = "This model does not support specifying dimensions. Its vectors have 384, 'd' is"


@pytest.mark.parametrize(
    ("changes", "dimensions", "expected"),
    [
        ({}, 384, None),
        ({}, 383, f"{NO_DIMENSIONS} 383: leave it out, or set 384 (--matryoshka allows fewer)"),
        ({}, 0, f"{NO_DIMENSIONS} 0: leave it out, or set 384"),
        ({"is_matryoshka": True}, 1, 1),
        ({"is_matryoshka": True}, 0, "'d' must be 1 to 384, is 0"),
        ({"is_matryoshka": True}, 385, "'d' must be 1 to 384, is 385"),
        ({"is_matryoshka": True, "matryoshka_dims": (64, 128)}, 128, 128),
        ({"is_matryoshka": True, "matryoshka_dims": (64, 128)}, 384, None),
        ({"is_matryoshka": True, "matryoshka_dims": (64, 128)}, 100, f"{ONE_OF} 64, 128, 384, is 100 {ALLOWS_ANY}"),
        ({"is_matryoshka": True, "truncate_dim": 64}, 384, 384),  # None would be 64
    ],
)
def test_dimensions(changes, dimensions, expected):
    model_info = changed(PLAIN, **changes)
    if isinstance(expected, str):
        with pytest.raises(BadRequest) as caught:
            model_info.check_dimensions(dimensions, "d")
        assert caught.value.message == expected
        assert caught.value.param == "d"
    else:
        assert model_info.check_dimensions(dimensions, "d") == expected


def test_a_limit_that_leaves_no_room_for_a_text_names_its_field():
    model_info = changed(PLAIN, least_tokens=3)
    assert model_info.check_max_tokens(3, "max_tokens") == 3
    with pytest.raises(BadRequest, match=r"'max_tokens' must be at least 3, .*, is 2") as caught:
        model_info.check_max_tokens(2, "max_tokens")
    assert caught.value.param == "max_tokens"


# --- several models ---------------------------------------------------------------------------------------------


def served(model: str, *capabilities: str, **changes: Any) -> ModelInfo:
    return changed(PLAIN, model=model, capabilities=capabilities or ("dense",), **changes)


MINILM = served(
    "minilm",
    aliases=("text-embedding-3-small", "Mini"),
    prompts={"query": "query: "},
    folder="all-MiniLM-L6-v2",
)
BGE = served("BAAI/bge-m3", "dense", "sparse", folder="model")
RANKER = served("ranker", "rerank", folder="model")
TAGGED = served("nomic:query", folder="x")
ALL = (MINILM, BGE, RANKER, TAGGED)


def models(*, refuses_unknown: bool = False, **options: Any) -> Models:
    return Models(ALL, refuses_unknown=refuses_unknown, **options)


@pytest.mark.parametrize(
    ("name", "expected", "own"),
    [
        ("minilm", MINILM, "minilm"),
        ("Mini", MINILM, "Mini"),
        ("all-MiniLM-L6-v2", MINILM, "minilm"),
        ("ALL-minilm-l6-V2", MINILM, "minilm"),
        ("sentence-transformers/MiniLM", MINILM, "minilm"),
        ("minilm:qurey", MINILM, "minilm:qurey"),
        ("baai/BGE-M3", BGE, "BAAI/bge-m3"),
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
        "/minilm/model.safetensors",
        "https://example.com/bge-m3",
        "minilm\0",
        "x" * 2**20,
        "minilm:" + "x" * 2**20,
        "\ud800",
    ],
)
def test_a_name_that_is_unknown(name):
    assert models().find(name) is None
    assert models().choose(name, ("dense",)) is MINILM
    assert models().own_name(BGE, name) == "BAAI/bge-m3"


def test_an_alias_with_request_defaults_finds_its_model_with_them():
    plain = changed(MINILM, alias_defaults=(AliasDefaults("Mini", prompt="x"),))
    known = Models((plain, BGE), refuses_unknown=True)
    seen = known.find("Mini")
    assert seen is not None
    assert (seen.config, seen.default_prompt, plain.default_prompt) == (plain.config, "x", "")
    for name in ("Mini", "mini", "Mini:latest", "org/MINI", "Mini:query"):
        assert known.find(name) is seen
    assert known.own_name(seen, "mini") == "Mini"
    assert known.own_name(seen, "MINI:query") == "minilm:query"
    for name in ("minilm", "text-embedding-3-small", "all-MiniLM-L6-v2"):
        assert known.find(name) is plain
    assert known.all == (plain, BGE)
    assert Models((plain,), refuses_unknown=True).are_several


def test_exact_names_come_first():
    upper, lower = served("E5"), served("e5", aliases=("large",))
    other = served("large", folder="E5")
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
        (("sparse", "multi-vector"), BGE),
        (("classify", "rerank"), RANKER),
        (("sparse", "dense"), BGE),
        (("classify",), MINILM),  # none can: the first says so
    ],
)
def test_the_default_of_a_kind_is_the_first_that_can(needs, expected):
    assert models().choose(None, needs) is expected
    assert models().choose("", needs) is expected
    assert models().choose("gpt-4", needs) is expected
    assert models(refuses_unknown=True).choose(None, needs) is expected


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
    log_stand_in.cache_clear()
    with caplog.at_level(logging.INFO, "vecd.gateway"):
        for _ in range(3):
            models().choose("gpt-4\n" + "x" * 2**20, ("rerank",))
            models().choose("ranker", ("rerank",))
        [record] = caplog.records
        assert "ranker answers" in record.message
        assert "gpt" not in record.message


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/m/minilm:query/embed", ("minilm:query", "/embed")),
        ("/m/minilm", ("minilm", "/")),
        ("/m/minilm//embed", ("minilm", "//embed")),
        ("/m/BAAI/bge-m3/v1/embeddings", ("BAAI/bge-m3", "/v1/embeddings")),
        ("/m/org/minilm/embed", ("org/minilm", "/embed")),
        ("/m/../minilm/embed", None),
        ("/m/" + "/x" * 2000 + "/minilm/embed", None),
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


def test_a_name_in_a_header_is_in_ascii():
    assert header_value("BAAI/bge-m3:query") == "BAAI/bge-m3:query"
    assert header_value("é\r\nx: y") == "%C3%A9%0D%0Ax%3A%20y"


# --- adapters by task -------------------------------------------------------------------------------------------

V3 = "jinaai/jina-embeddings-v3"
OF_QUERIES = served(f"{V3}/retrieval.query", task="retrieval.query", prompts={"retrieval.query": "q: "}, prompt="q: ")
OF_PASSAGES = served(f"{V3}/retrieval.passage", task="retrieval.passage", prompts={"retrieval.passage": "p: "})
OF_CLUSTERS = served(f"{V3}/separation", task="separation", aliases=("clusters",))
V5 = served("v5/retrieval", task="retrieval", prompts={"query": "Query: ", "document": "Document: "})
V5_MATCHING = served("v5/text_matching", task="text_matching")
PLAIN_V5 = served("v5", task="")
OF_TASKS = (MINILM, OF_QUERIES, OF_PASSAGES, OF_CLUSTERS, V5, V5_MATCHING, PLAIN_V5)


@pytest.mark.parametrize(
    ("name", "purpose", "expected"),
    [
        (V3, "retrieval.query", OF_QUERIES),
        ("jina-embeddings-V3", "search_document", OF_PASSAGES),
        (V3, "clustering", OF_CLUSTERS),
        (V3, "code.query", OF_QUERIES),
        (f"{V3}:query", "", OF_QUERIES),
        (f"{V3}/separation", "", OF_CLUSTERS),
        ("jina-embeddings-v3/separation", "", OF_CLUSTERS),
        ("clusters", "", OF_CLUSTERS),
        ("v5", "retrieval.query", V5),
        ("v5", "document", V5),
        ("v5", "text-matching", V5_MATCHING),
        ("v5", "", PLAIN_V5),
        ("v5", "string", PLAIN_V5),
        ("other", "retrieval.query", MINILM),
        (None, "retrieval.query", MINILM),
    ],
)
def test_a_task_chooses_among_the_adapters_of_a_base(name, purpose, expected):
    assert Models(OF_TASKS, refuses_unknown=False).choose(name, ("dense",), purpose=purpose) is expected


@pytest.mark.parametrize(
    ("name", "purpose", "given"),
    [
        (V3, "", ""),
        (V3, "classification", ", is 'classification'"),
        (V3, "x" * 99, ", is 'xxx"),
        ("v5", "clustering", ""),
    ],
)
def test_a_task_without_an_adapter_is_refused_with_those_that_are_served(name, purpose, given):
    with pytest.raises(BadRequest, match=r"'task' must be for one of the adapters of .* that are served: ") as caught:
        Models(OF_TASKS, refuses_unknown=False).choose(name, ("dense",), purpose=purpose)
    served_tasks = "'retrieval.query', 'retrieval.passage', 'separation'" if name == V3 else "'retrieval', 'text_match"
    assert (caught.value.status, caught.value.param) == (400, "task")
    assert f"served: {served_tasks}" in caught.value.message
    assert given in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("name", "given"),
    [(f"{V3}:latest", ""), (f"{V3}/classification", ", is 'classification'"), (f"{V3}/nope", ", is 'nope'")],
)
def test_no_other_model_answers_for_an_adapter_that_is_not_served(name, given):
    models = Models(OF_TASKS, refuses_unknown=False)
    with pytest.raises(BadRequest, match=rf"'model' must be for one of .*, 'separation'{given}$") as caught:
        models.choose(name, ("dense",), word="model")
    assert caught.value.param == "model"


def test_an_adapter_that_is_still_to_come_is_waited_for():
    models = Models((MINILM, OF_QUERIES), refuses_unknown=False, is_complete=False)
    assert models.choose(V3, ("dense",), purpose="query") is OF_QUERIES
    for name, purpose in ((V3, "classification"), (f"{V3}/separation", "")):
        with pytest.raises(Unavailable):
            models.choose(name, ("dense",), purpose=purpose)


def test_an_adapter_is_for_its_task_alone():
    assert OF_QUERIES.prompt_for("query") == OF_QUERIES.prompt_for("retrieval.query") == "q: "
    assert V5.prompt_for("retrieval.passage") == "Document: "
    assert OF_CLUSTERS.prompt_for("clustering") is None
    for model_info, purpose, has in (
        (OF_QUERIES, "retrieval.passage", "has that of 'retrieval.query'"),
        (OF_CLUSTERS, "search_query", "has that of 'separation'"),
        (PLAIN_V5, "retrieval.query", "has none"),
    ):
        with pytest.raises(
            BadRequest, match=f"'task' '{purpose}' needs another adapter or route: model '.*' {has}"
        ) as caught:
            model_info.prompt_for(purpose, "task")
        assert caught.value.param == "task"


LEAF = "MongoDB/mdbr-leaf-ir-asym"
LEAF_QUERIES, LEAF_DOCUMENTS = served(f"{LEAF}/query", task="query"), served(LEAF, task="document")


@pytest.mark.parametrize(
    ("name", "purpose", "expected"),
    [
        (LEAF, "", LEAF_DOCUMENTS),
        (LEAF, "search_document", LEAF_DOCUMENTS),
        (LEAF, "query", LEAF_QUERIES),
        (f"{LEAF}:query", "", LEAF_QUERIES),
        ("mdbr-leaf-ir-asym", "retrieval.query", LEAF_QUERIES),
        (f"{LEAF}/query", "", LEAF_QUERIES),
        (f"{LEAF}/query", "passage", None),
        (LEAF, "clustering", None),
    ],
)
def test_a_router_s_default_route_has_the_name_alone_and_gives_its_other_texts_away(name, purpose, expected):
    models = Models((MINILM, LEAF_DOCUMENTS, LEAF_QUERIES), refuses_unknown=False)
    if expected is not None:
        assert models.choose(name, ("dense",), purpose=purpose) is expected
        return
    with pytest.raises(BadRequest):
        models.choose(name, ("dense",), purpose=purpose).prompt_for(purpose)


def test_a_prompt_of_the_other_role_is_refused_too():
    of_documents = served(LEAF, task="document", prompts={"query": "q: ", "document": "d: ", "own": "o: "})
    assert [of_documents.prompt_named(name, "prompt_name") for name in ("document", "own")] == ["d: ", "o: "]
    for seen in (of_documents, of_documents.by_alias(AliasDefaults("leaf", prompt_name="own"))):
        with pytest.raises(BadRequest, match="'prompt_name' 'query' needs another adapter or route") as caught:
            seen.prompt_named("query", "prompt_name")
        assert caught.value.param == "prompt_name"
    assert seen.default_prompt == "o: "


def test_a_base_of_two_organizations_means_neither():
    other = served("other/jina-embeddings-v3/classification", task="classification")
    models = Models((MINILM, OF_QUERIES, other), refuses_unknown=False)
    assert models.choose("other/jina-embeddings-v3", ("dense",), purpose="classification") is other
    assert models.choose("jina-embeddings-v3", ("dense",), purpose="classification") is MINILM
    assert models.choose("jina-embeddings-v3", ("dense",), purpose="query") is MINILM
