"""Prompts and request defaults of aliases in tables: how they are read, what is refused, and what the plan has."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.support.cards import DENSE, HYBRID, MULTI_VECTOR, RERANKER, SPARSE
from tests.unit.launch.config.test_models import load, problems
from vecd.base.failures import ConfigurationError
from vecd.base.flags import flags_in, kinds_in
from vecd.gateway.config import MAX_PROMPT_CHARACTERS, AliasDefaults
from vecd.gateway.request import MAX_PROMPT_CHARS, Dtype, Overflow, Role
from vecd.launch.config.models import check_defaults, with_prompts
from vecd.launch.config.plan import make_plans
from vecd.model.card import ModelCard
from vecd.model.steps import Step
from vecd.shm.settings import Settings

CARD = replace(
    DENSE, dim=16, steps=(Step("normalize"),), prompt="own: ", prompts=(("query", "query: "), ("own", "own: "))
)


def test_names_are_those_of_requests() -> None:
    for name, kind in (("role", Role), ("dtype", Dtype), ("overflow", Overflow)):
        [names] = kinds_in(flags_in(AliasDefaults)[name][0])
        assert get_args(names) == tuple(each.value for each in kind)
    assert MAX_PROMPT_CHARACTERS == MAX_PROMPT_CHARS


# --- reading --------------------------------------------------------------------------------------------------------


def test_aliases_with_and_without_defaults() -> None:
    [entry] = load(
        toml="""
[models.a]
prompts = { query = "q: ", "my own" = "" }
default-prompt = "query"
[models.a.aliases.plain]
[models.a.aliases."text-embedding-3-small"]
prompt-name = "query"
dimensions = 256
role = "query"
dtype = "int8"
overflow = "chunk"
[models.a.aliases.raw]
prompt = ""
raw_scores = false
"""
    )
    assert entry.aliases == ("plain", "text-embedding-3-small", "raw")
    small = AliasDefaults(
        "text-embedding-3-small", prompt_name="query", dimensions=256, role="query", dtype="int8", overflow="chunk"
    )
    assert entry.alias_defaults == (small, AliasDefaults("raw", prompt="", raw_scores=False))
    assert small.given() == {
        "prompt_name": "query", "role": "query", "dimensions": 256, "dtype": "int8", "overflow": "chunk",
    }  # fmt: skip
    assert (entry.prompts, entry.default_prompt) == ((("query", "q: "), ("my own", "")), "query")


def test_a_list_of_aliases_has_no_defaults() -> None:
    [entry] = load(toml='[models.a]\naliases = ["b", "c"]')
    assert (entry.aliases, entry.alias_defaults, entry.prompts) == (("b", "c"), (), ())


def test_every_problem_of_a_table_is_told_at_once() -> None:
    told = problems(
        toml=f"""
[models.a]
prompts = {{ query = 3, "" = "x", long = "{"x" * 4097}" }}
default_prompt = 1
[models.a.aliases.b]
prompt = 1
prompt_name = "x"
dimensions = 0
role = "asker"
dtype = "float8"
overflow = "cut"
raw_scores = "maybe"
promt = "x"
[models.a.aliases]
c = "prompt"
A = {{ dimensions = true }}
[models.d]
prompts = "query: "
"""
    )
    assert sorted(told) == sorted(
        [
            "c.toml: [models.a]: prompts: 'query': must be a text (given: 3)",
            "c.toml: [models.a]: prompts: a prompt must have a name",
            "c.toml: [models.a]: prompts: 'long': must have at most 4096 characters, has 4097 (given: '"
            + 59 * "x"
            + "…)",
            "c.toml: [models.a]: default_prompt: must be a text (given: 1)",
            "c.toml: [models.a]: aliases: 'b': prompt: must be a text (given: 1)",
            "c.toml: [models.a]: aliases: 'b': prompt, prompt_name: both choose the prompt; remove one of them",
            "c.toml: [models.a]: aliases: 'b': dimensions: must be a whole number of at least 1 (given: 0)",
            "c.toml: [models.a]: aliases: 'b': role: must be 'query' or 'document' (given: 'asker')",
            "c.toml: [models.a]: aliases: 'b': dtype: must be 'float32', 'float16', 'bfloat16', 'int8', 'uint8', "
            "'binary' or 'ubinary' (given: 'float8')",
            "c.toml: [models.a]: aliases: 'b': overflow: must be 'error', 'truncate', 'truncate_left' or 'chunk' "
            "(given: 'cut')",
            "c.toml: [models.a]: aliases: 'b': raw_scores: must be true or false (given: 'maybe')",
            "c.toml: [models.a]: aliases: 'b': promt: there is no such request default; did you mean prompt?",
            "c.toml: [models.a]: aliases: 'c': must be a table of prompt, prompt_name, role, dimensions, dtype, "
            "overflow, raw_scores (given: 'prompt')",
            "c.toml: [models.a]: aliases: 'A': dimensions: must be a whole number of at least 1 (given: True)",
            "c.toml: [models.a]: aliases: the name 'A' is that of c.toml: [models.a], too",
            'c.toml: [models.d]: prompts: must be a table of texts, { query = "…" } (given: \'query: \')',
        ]
    )  # fmt: skip


# --- prompts --------------------------------------------------------------------------------------------------------


def card_in(folder: Path, default: str | None) -> ModelCard:
    """CARD, of a folder whose files have that default prompt."""
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"default_prompt_name": default}))
    return replace(CARD, folder=str(folder), prompt=dict(CARD.prompts).get(default or "", ""))


@pytest.mark.parametrize(
    ("own_default", "prompts", "default", "prompt", "expected"),
    [
        ("own", {"document": "d: "}, None, "own: ", {"query": "query: ", "own": "own: ", "document": "d: "}),
        ("own", {"own": "mine: "}, None, "mine: ", {"query": "query: ", "own": "mine: "}),
        ("own", {}, "query", "query: ", {"query": "query: ", "own": "own: "}),
        (None, {"new": "n: "}, "new", "n: ", {"query": "query: ", "own": "own: ", "new": "n: "}),
    ],
)
def test_prompts_replace_and_extend_the_model_s_own(
    tmp_path: Path,
    own_default: str | None,
    prompts: dict[str, str],
    default: str | None,
    prompt: str,
    expected: dict[str, str],
) -> None:
    card, wrong = with_prompts(card_in(tmp_path, own_default), tuple(prompts.items()), default)
    assert not wrong
    assert (card.prompt, dict(card.prompts)) == (prompt, expected)


@pytest.mark.parametrize(
    ("card", "prompts", "default", "why"),
    [
        (CARD, {}, "qurey", "default_prompt: the model has no prompt 'qurey'; it has 'query', 'own'"),
        (RERANKER, {"query": "q"}, None, "prompts, default_prompt: this model is for rerank, and takes none"),
        (MULTI_VECTOR, {"query": "q"}, None, "prompts, default_prompt: a multi-vector model has templates"),
        (replace(CARD, pools_prompt=False), {}, "query", "default_prompt: the model leaves prompts out"),
    ],
)
def test_prompts_that_a_model_cannot_have(
    card: ModelCard, prompts: dict[str, str], default: str | None, why: str
) -> None:
    _, [told] = with_prompts(card, tuple(prompts.items()), default)
    assert told.startswith(why)


# --- request defaults -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "defaults", "why"),
    [
        (CARD, {"prompt_name": "query", "role": "query"}, ""),
        (CARD, {"prompt_name": "qurey"}, "prompt_name: the model has no prompt 'qurey'; it has 'query', 'own'"),
        (replace(CARD, prompts=()), {"role": "query"}, "role: the model has no prompts"),
        (replace(CARD, pools_prompt=False), {"prompt": "x"}, "prompt: the model leaves prompts out"),
        (replace(CARD, pools_prompt=False), {"role": "query"}, "role: the model leaves prompts out"),
        (MULTI_VECTOR, {"role": "query"}, ""),
        (replace(CARD, task="document"), {"role": "query"}, "role: the model has the modules for each document alone"),
        (replace(CARD, task="document"), {"prompt_name": "query"}, "prompt_name: the model has the modules for each"),
        (replace(CARD, task="query"), {"role": "query", "prompt_name": "query"}, ""),
        (MULTI_VECTOR, {"prompt": "x"}, "prompt: a multi-vector model has templates"),
        (RERANKER, {"raw_scores": True, "overflow": "error"}, ""),
        (CARD, {"raw_scores": True}, "raw_scores: is for rerankers; this model is for dense"),
        (CARD, {"dimensions": 16}, ""),
        (CARD, {"dimensions": 8}, "dimensions: the model's vectors have 16, 8 given (matryoshka = true allows fewer)"),
        (SPARSE, {"dimensions": 8}, "dimensions: is for dense vectors; this model is for sparse"),
        (replace(CARD, dim=12), {"dtype": "ubinary"}, "dtype: ubinary needs a number of dimensions"),
        (HYBRID, {"dtype": "int8"}, "dtype: int8 is for vectors of length 1"),
    ],
)
def test_what_a_model_can_do(card: ModelCard, defaults: dict[str, Any], why: str) -> None:
    told = check_defaults(AliasDefaults("a", **defaults), card, Settings())
    assert [each.startswith(f"aliases: 'a': {why}") for each in told] == ([True] if why else [])


@pytest.mark.parametrize(
    ("dims", "defaults", "has_ranges", "why"),
    [
        ((), {"dimensions": 3}, False, ""),
        ((4, 8), {"dimensions": 6}, False, "dimensions: must be one of 4, 8, 16 (given: 6)"),
        ((), {"dimensions": 12, "dtype": "binary"}, False, "dtype: binary needs a number of dimensions"),
        ((), {"dimensions": 12, "dtype": "int8"}, False, ""),
        ((), {"dimensions": 12, "dtype": "int8"}, True, "dtype: int8 with --quantization-ranges is for whole vectors"),
    ],
)
def test_fewer_dimensions(dims: tuple[int, ...], defaults: dict[str, Any], has_ranges: bool, why: str) -> None:
    card = replace(CARD, matryoshka_dims=dims)
    told = check_defaults(
        AliasDefaults("a", **defaults),
        card,
        Settings(matryoshka=True, quantization_ranges=Path("r") if has_ranges else None),
    )
    assert [each.startswith(f"aliases: 'a': {why}") for each in told] == ([True] if why else [])


@pytest.mark.parametrize(
    ("changes", "defaults"),
    [({"steps": ()}, {"dimensions": 8}), ({"truncate_dim": 8}, {}), ({"truncate_dim": 8}, {"dimensions": 16})],
)
def test_fewer_dimensions_of_vectors_of_any_length_have_no_scale_either(
    changes: dict[str, Any], defaults: dict[str, Any]
) -> None:
    card = replace(CARD, **changes)
    [told] = check_defaults(AliasDefaults("a", dtype="int8", **defaults), card, Settings(matryoshka=True))
    assert told.startswith("aliases: 'a': dtype: int8 is for vectors of length 1")


# --- the plan -------------------------------------------------------------------------------------------------------


def test_the_plan_has_them_and_the_workers_know_nothing_of_prompts(minilm_folder: Path) -> None:
    source = f"source = '{minilm_folder}'\n"
    toml = f"[models.a]\n{source}" + 'prompts = { query = "q: " }\n[models.a.aliases.b]\nrole = "query"\n'
    plans = [
        make_plans(load("--device", "cpu", "--engine", "dummy", toml=text)) for text in (toml, f"[models.a]\n{source}")
    ]
    (with_them,), (without,) = plans
    assert with_them.gateway.card.prompts == with_them.card.prompts == (("query", "q: "),)
    assert with_them.gateway.alias_defaults == (AliasDefaults("b", role="query"),)
    assert with_them.card != without.card  # by which a reload sees that the model has changed
    assert with_them.workers == without.workers
    for [made] in plans:
        made.close()


def test_all_that_the_models_cannot_do_is_told_at_once(minilm_folder: Path) -> None:
    toml = "".join(
        f"[models.{name}]\nsource = '{minilm_folder}'\ndefault-prompt = 'x'\n"
        f"[models.{name}.aliases.{name}2]\ndimensions = 5\nraw_scores = true\n"
        for name in ("a", "b")
    )
    with pytest.raises(ConfigurationError) as caught:
        make_plans(load("--device", "cpu", "--engine", "dummy", toml=toml))
    assert [problem.split(": ")[:4] for problem in caught.value.problems] == [
        [name, *rest]
        for name in ("a", "b")
        for rest in (
            ["default_prompt", "the model has no prompt 'x'; it has none"],
            ["aliases", f"'{name}2'", "dimensions"],
            ["aliases", f"'{name}2'", "raw_scores"],
        )
    ]
