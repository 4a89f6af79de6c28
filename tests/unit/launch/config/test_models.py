"""Which models a configuration has, what is refused, the plans of several, and their numbers."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from vecd.base.failures import EXIT_BAD_CONFIGURATION, ConfigurationError
from vecd.gateway.config import GatewayConfig
from vecd.launch.check.command import main as check
from vecd.launch.config.models import ModelEntry, load_models, numbered
from vecd.launch.config.plan import Plan, make_plans
from vecd.launch.config.settings import load_settings
from vecd.model.card import ModelError


def load(*argv: str, toml: str = "") -> tuple[ModelEntry, ...]:
    if toml:
        Path("c.toml").write_text(toml)
        argv = ("--config", "c.toml", *argv)
    return load_models(load_settings(argv))


def problems(*argv: str, toml: str = "") -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        load(*argv, toml=toml)
    return caught.value.problems


def named(entries: tuple[ModelEntry, ...]) -> list[tuple[str, str]]:
    return [(entry.name, entry.settings.model) for entry in entries]


# --- arguments --------------------------------------------------------------------------------------------------------


def test_one_model_is_as_it_was() -> None:
    settings = load_settings(["org/m", "--model-aliases", "a, b", "--served-model-name", "n"])
    [entry] = load_models(settings)
    assert entry.settings is settings
    assert (entry.name, entry.settings.model, entry.aliases) == ("n", "org/m", ("a", "b"))
    assert named(load()) == [("", "")]
    assert named(load("")) == [("", "")]


@pytest.mark.parametrize(
    "argv",
    [
        ["--no-ui", "org/a", "--port=1", "B=b", "--strict-model"],
    ],
)
def test_models_stand_before_between_and_after_flags(argv: list[str]) -> None:
    assert named(load(*argv)) == [("org/a", "org/a"), ("B", "b")]


def test_a_model_is_named_by_its_folder_or_its_id(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert [name for name, _ in named(load("./folder", "org/a", "b"))] == ["folder", "org/a", "b"]


def test_a_path_with_an_equals_sign_is_no_name(tmp_path: Path) -> None:
    (tmp_path / "a=b").mkdir()
    assert named(load("a=b")) == [("", "a=b")]
    assert named(load("C=a=b")) == [("C", "a=b")]
    for path in ("./x=y", "/x=y", "~/x=y", "C:\\x=y"):
        assert named(load(path)) == [("", path)]


def test_a_folder_with_a_name_for_no_path_needs_another(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    assert named(load("./a b")) == [("", "./a b")]
    [problem] = problems("./a b", "org/m")
    assert problem.startswith("MODEL './a b': the name 'a b' must begin with a letter")
    assert problem.endswith("; NAME=MODEL gives the model another")
    assert named(load("C=./a b", "org/m")) == [("C", "./a b"), ("org/m", "org/m")]


def test_what_cannot_be_a_path_is_left_to_the_plan() -> None:
    assert named(load("x" * 100_000)) == [("", "x" * 100_000)]
    assert named(load("~no-such-user/m")) == [("", "~no-such-user/m")]
    with pytest.raises(ModelError, match="no such folder"):
        make_plans(load("~no-such-user/m"))


def test_what_no_path_has_is_refused() -> None:
    for setting in ("model", "models.a.source"):
        [problem] = problems(toml=f'{setting} = "a\\u0000b"')
        assert problem.endswith("must not have a NUL character (given: 'a\\x00b')")


def test_the_file_and_the_environment_name_models(monkeypatch: pytest.MonkeyPatch) -> None:
    assert named(load(toml='model = "org/a"')) == [("", "org/a")]
    assert named(load(toml='model = ["org/a", "B=b"]')) == [("org/a", "org/a"), ("B", "b")]
    monkeypatch.setenv("VECD_MODEL", "org/c")
    assert named(load(toml='model = ["org/a", "B=b"]')) == [("", "org/c")]
    assert named(load("org/d", toml='model = "org/a"')) == [("", "org/d")]


@pytest.mark.parametrize(
    ("argv", "toml", "told"),
    [
        (["a", "b", "--served-model-name", "n"], "", "--served-model-name: 'n' given, which is for the only model, if"),
        ([], "[models.a]\nsource = 'x'\n[models.a]\nsource = 'y'", "c.toml: cannot be read: Cannot declare"),
        (["B="], "", "MODEL 'B=': has no model after the name"),
        (["a", "A"], "", "MODEL 'A': the name 'A' is that of MODEL 'a', too"),
        (["x=a"], "[models.x]\nsource = 'b'", "c.toml: [models.x]: the name 'x' is that of MODEL 'x=a', too"),
        (["a", "b", "--unknown-model", "any"], "", "--unknown-model: any given, but a name that is not configured can"),
        (["a", "--strict-model", "--unknown-model", "default"], "", "--strict-model: means --unknown-model refuse"),
    ],
)
def test_what_is_refused(argv: list[str], toml: str, told: str) -> None:
    [problem] = problems(*argv, toml=toml)
    assert problem.startswith(told)


@pytest.mark.parametrize("toml", ["model = ['a', 3]", "model = ['']", 'model = ["a\\u0000b", "c"]', "model = [['a']]"])
def test_a_list_of_models_is_of_names(toml: str) -> None:
    [problem] = problems(toml=toml)
    assert problem.startswith("c.toml: model: must be the folder or id of a model, or a list of such (given: [")


@pytest.mark.parametrize(
    ("argv", "policies"),
    [
        (["a"], ["any"]),
        (["a", "--strict-model"], ["refuse"]),
        (["a", "--unknown-model", "default"], ["default"]),
        (["a", "b"], ["default"] * 2),
    ],
)
def test_what_becomes_of_unknown_names(argv: list[str], policies: list[str], minilm_folder: Path) -> None:
    folders = [f"{word}={minilm_folder}" if word in ("a", "b") else word for word in argv]
    plans = make_plans(load("--device", "cpu", "--engine", "dummy", *folders))
    assert [made.gateway.unknown_model for made in plans] == policies
    for made in plans:
        made.close()


# --- tables -----------------------------------------------------------------------------------------------------------


TABLES = """
max-tokens = 100
overflow = "error"

[models.embed]
source = "org/e"
aliases = ["text-embedding-3-small", "e"]
max-tokens = 50
weight = 2

[models."org/rerank"]
model = "org/r"
kind = "rerank"
workers = 1
yes = "true"
template = "{query}|{document}"
"""


def test_tables() -> None:
    embed, rerank = load("--overflow", "chunk", toml=TABLES)
    assert named((embed, rerank)) == [("embed", "org/e"), ("org/rerank", "org/r")]
    assert (embed.weight, rerank.weight) == (2, 1)
    assert embed.aliases == ("text-embedding-3-small", "e")
    assert (rerank.yes, rerank.no, rerank.template) == ("true", "", "{query}|{document}")
    assert (rerank.settings.kind, rerank.settings.workers, embed.settings.workers) == ("rerank", 1, "auto")


def test_a_table_takes_precedence_over_the_server_s_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VECD_DTYPE", "float32")
    toml = TABLES + '[models.third]\nsource = "t"\noverflow = "truncate"\ndtype = "int8"\n'
    entries = load("--overflow", "chunk", "--max-tokens", "70", toml=toml)
    assert [entry.settings.max_tokens for entry in entries] == [50, 70, 70]
    assert [entry.settings.overflow for entry in entries] == ["chunk", "chunk", "truncate"]
    assert [entry.settings.dtype for entry in entries] == ["float32", "float32", "int8"]


def test_every_problem_of_the_tables_is_told_at_once() -> None:
    told = problems(
        "--unknown-model",
        "any",
        toml="""
[models]
plain = "org/x"
[models.a]
source = "x"
model = "y"
wrokers = 2
load = "later"
port = 9
vector-cache = 9
served-model-name = "b"
dtype = "float8"
max_inputs = 0
weight = 0
aliases = ["B", "B", "A", "a b"]
[models.b]
source = 3
aliases = "x"
[models."c/"]
[models."d..e"]
[models."a\\u0000"]
[models.f]
aliases = {h = 1}
""",
    )
    must = "must begin with a letter, a digit or _, and have no others than the characters A-Z a-z 0-9 . _ : - and "
    must += "slashes between them, without '..': it stands in paths, as /m/NAME/v1/embeddings"
    assert sorted(told) == sorted(
        [
            "c.toml: [models.plain]: must be a table with the model's settings",
            "c.toml: [models.a]: source, model: mean the same; remove one of them",
            "c.toml: [models.a]: wrokers: there is no such setting; did you mean workers?",
            "c.toml: [models.a]: load: must be 'start' or 'demand' (given: 'later')",
            "c.toml: [models.a]: port: is for the whole server: it must stand above the tables",
            "c.toml: [models.a]: vector-cache: is for the whole server: it must stand above the tables",
            "c.toml: [models.a]: served-model-name: cannot stand in a table: the table's own name is the model's: "
            "[models.NAME]",
            "c.toml: [models.a]: dtype: must be 'auto', 'float32', 'bfloat16', 'float16' or 'int8' (given: 'float8')",
            "c.toml: [models.a]: max_inputs: must be a whole number from 1 to 100000 (given: 0)",
            "c.toml: [models.a]: weight: must be a number above 0 and at most 1000 (given: 0)",
            "c.toml: [models.a]: aliases: the name 'B' is that of c.toml: [models.a], too",
            "c.toml: [models.a]: aliases: the name 'A' is that of c.toml: [models.a], too",
            f"c.toml: [models.a]: aliases: the name 'a b' {must}",
            'c.toml: [models.b]: aliases: must be names, ["NAME"], or tables of request defaults, '
            "[models.NAME.aliases.ALIAS] (given: 'x')",
            "c.toml: [models.b]: the name 'b' is that of c.toml: [models.a], too",
            "c.toml: [models.b]: source: must be a text (given: 3)",
            f"c.toml: [models.\"c/\"]: the name 'c/' {must}",
            f"c.toml: [models.\"d..e\"]: the name 'd..e' {must}",
            f"c.toml: [models.\"a\\u0000\"]: the name 'a\\x00' {must}",
            "c.toml: [models.f]: aliases: 'h': must be a table of prompt, prompt_name, role, dimensions, dtype, "
            "overflow, raw_scores (given: 1)",
            "--unknown-model: any given, but a name that is not configured can mean any of 6 models: must be default "
            "or refuse",
        ]
    )


def test_a_name_with_a_dot_is_written_in_quotes() -> None:
    assert problems(toml="[models.bge-v1.5]\nsource = 'x'") == [
        'c.toml: [models.bge-v1]: 5: is a table; a name with a dot is written in quotes: [models."bge-v1.5"]'
    ]
    assert named(load(toml="[models.'bge-v1.5']\nsource = 'x'")) == [("bge-v1.5", "x")]


@pytest.mark.parametrize("key", ["api-key", "api-keys", "apikey", "otlp-endpoint"])
def test_a_key_in_a_table_is_never_shown(key: str) -> None:
    [problem] = problems(toml=f"[models.a]\n{key} = 'http://u:s3cret@c'")
    assert "s3cret" not in problem


@pytest.mark.parametrize("weight", ["-1", "true", "'one'", "inf", "nan", "1e9"])
def test_a_weight_is_a_number(weight: str) -> None:
    [problem] = problems(toml=f"[models.a]\nweight = {weight}")
    assert problem.startswith("c.toml: [models.a]: weight: must be a number above 0 and at most 1000 (given: ")


def test_vecd_check_takes_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    Path("c.toml").write_text(TABLES)
    assert check(["--config", "c.toml", "org/a"]) == EXIT_BAD_CONFIGURATION
    told = "vecd check: MODEL: vecd check takes one model, or --all, and these are given: org/a, embed, org/rerank\n"
    assert capsys.readouterr().err == told


# --- plans ------------------------------------------------------------------------------------------------------------


def test_workers_are_numbered_over_all_models(minilm_folder: Path) -> None:
    toml = "".join(
        f"[models.{name}]\nsource = '{minilm_folder}'\nworkers = {workers}\naliases = ['{name}2']\n"
        for name, workers in (("a", 3), ("b", 1), ("c", 70))
    )
    toml += "weight = 2.5\n"
    plans = make_plans(load("--device", "cpu", "--engine", "dummy", "--gateways", "2", toml=toml))
    configs = [made.gateway for made in plans]
    assert [config.model for config in configs] == ["a", "b", "c"]
    assert [config.aliases for config in configs] == [("a2",), ("b2",), ("c2",)]
    assert [config.model_index for config in configs] == [0, 1, 2]
    assert [config.first_worker for config in configs] == [0, 3, 4]
    assert [config.weight for config in configs] == [1.0, 1.0, 2.5]
    assert [config.num_workers for config in configs] == [len(made.workers) for made in plans] == [3, 1, 70]
    assert {config.gateways for config in configs} == {2}
    for made in plans:
        made.close()


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_the_problems_of_all_models_are_told_and_no_descriptor_stays_open(minilm_folder: Path) -> None:
    good = f"[models.good]\nsource = '{minilm_folder}'\n"
    toml = good + "".join(
        f"[models.{name}]\nsource = '{minilm_folder}'\nmax-tokens = {limit}\n"
        for name, limit in (("a", 999), ("b", 998))
    )
    entries = load("--device", "cpu", "--engine", "dummy", "--tls-key", "k", toml=toml)
    before = num_open()
    with pytest.raises(ConfigurationError) as caught:
        make_plans(entries)
    assert caught.value.problems == [
        "--tls-key: given without --tls-cert; TLS needs both",
        "a: --max-tokens: 999 given, the model takes at most 256",
        "b: --max-tokens: 998 given, the model takes at most 256",
    ]
    assert num_open() == before
    with pytest.raises(ModelError, match=r"^none2: .*/no/other.*; none: .*/no/folder") as failed:
        make_plans(load("--engine", "dummy", "none2=/no/other", toml=good + "[models.none]\nsource = '/no/folder'"))
    assert "good" not in str(failed.value)
    assert num_open() == before


def test_the_vector_cache_is_for_the_models_with_dense_vectors(minilm_folder: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "ranker").mkdir()
    for path in minilm_folder.glob("*.json"):
        if path.name not in ("config.json", "modules.json"):
            (folder / path.name).symlink_to(path)
    (folder / "model.safetensors").touch()
    read = json.loads((minilm_folder / "config.json").read_text())
    ranking = {"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (folder / "config.json").write_text(json.dumps(read | ranking))
    flags = ["--device", "cpu", "--engine", "dummy", "--vector-cache"]
    dense, ranker = f"a={minilm_folder}", f"b={folder}"
    for plan in make_plans(load(*flags, "1000000", dense, ranker)):
        assert plan.gateway.vector_cache == 1_000_000
        plan.close()
    with pytest.raises(ConfigurationError, match=r"^--vector-cache: 1000000 .* no model has such$"):
        make_plans(load(*flags, "1000000", ranker, ranker.replace("b=", "c=")))
    with pytest.raises(ConfigurationError, match=r"^a: --vector-cache: 1000 bytes given, this model needs at least"):
        make_plans(load(*flags, "1000", dense, ranker))


# --- numbers --------------------------------------------------------------------------------------------------------


Numbers = dict[str, tuple[int, int, int]]
"""By model: its index, its first worker, and the number of its workers."""


@pytest.fixture
def renumbered(planned: Callable[..., Plan]) -> Callable[[dict[str, int], Numbers], Numbers]:
    """The indices for models with so many workers, with room for 4 models and 10 workers."""
    config = replace(planned().gateway, metrics_models=4, metrics_workers=10)

    def one(model: str, index: int, first_worker: int, num_workers: int) -> GatewayConfig:
        return replace(config, model=model, model_index=index, first_worker=first_worker, num_workers=num_workers)

    def number(new: dict[str, int], served: Numbers) -> Numbers:
        before = {model: one(model, *numbers) for model, numbers in served.items()}
        fresh = [replace(one(model, 0, 0, num), metrics_models=1, metrics_workers=2) for model, num in new.items()]
        after = numbered(fresh, before)
        assert [config.model for config in after] == list(new)
        assert {(config.metrics_models, config.metrics_workers) for config in after} == {(4, 10)}
        return {config.model: (config.model_index, config.first_worker, config.num_workers) for config in after}

    return number


@pytest.mark.parametrize(
    ("new", "served", "expected"),
    [
        ({"a": 2}, {"a": (0, 0, 2)}, {"a": (0, 0, 2)}),
        ({"b": 9}, {"a": (0, 0, 8)}, {"b": (0, 0, 9)}),  # the only model has got another name
        ({"a": 2, "b": 1}, {"a": (0, 0, 2), "b": (1, 2, 3)}, {"a": (0, 0, 2), "b": (1, 2, 1)}),
        ({"b": 1}, {"a": (0, 0, 2), "b": (1, 2, 3)}, {"b": (1, 2, 1)}),
        # Grown where it is, and into what is free after the others.
        ({"a": 2, "b": 8}, {"a": (0, 0, 2), "b": (1, 2, 3)}, {"a": (0, 0, 2), "b": (1, 2, 8)}),
        ({"a": 3, "b": 3}, {"a": (0, 0, 2), "b": (1, 2, 3)}, {"a": (0, 5, 3), "b": (1, 2, 3)}),
        ({"a": 3, "b": 4}, {"a": (0, 0, 2), "b": (1, 2, 3)}, {"a": (0, 0, 3), "b": (1, 3, 4)}),
        # New ones: before, between and after those that stay.
        ({"c": 2, "a": 2}, {"a": (0, 0, 2)}, {"c": (1, 2, 2), "a": (0, 0, 2)}),
        ({"a": 2, "b": 2, "c": 1}, {"a": (0, 0, 2), "b": (2, 3, 2)}, {"a": (0, 0, 2), "b": (2, 3, 2), "c": (3, 2, 1)}),
        ({"b": 2, "c": 3}, {"a": (0, 0, 2), "b": (3, 2, 2)}, {"b": (3, 2, 2), "c": (0, 4, 3)}),
        ({"b": 2, "c": 2}, {"a": (0, 0, 2), "b": (1, 2, 2)}, {"b": (1, 2, 2), "c": (2, 0, 2)}),
    ],
)
def test_what_stays_keeps_its_indices(new: dict[str, int], served: Numbers, expected: Numbers, renumbered) -> None:
    assert renumbered(new, served) == expected


@pytest.mark.parametrize(
    ("new", "problem"),
    [
        ({"a": 11}, "workers: 11 given, at most 10 without a restart"),
        ({"a": 2, "b": 2, "c": 7}, "workers of c: 7 given, at most 6 without a restart"),
        (dict.fromkeys("abcde", 1), "models: 5 given, at most 4 without a restart"),
    ],
)
def test_what_has_no_room_is_refused(new: dict[str, int], problem: str, renumbered) -> None:
    with pytest.raises(ConfigurationError) as error:
        renumbered(new, {"a": (0, 0, 2), "b": (1, 2, 2)})
    assert error.value.problems == [problem]
