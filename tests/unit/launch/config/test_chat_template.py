import json
from pathlib import Path
from typing import Any

import pytest

from vecd.base.files import dump, load
from vecd.gateway.config import ChatTemplateSpec
from vecd.launch.config.templates import read_chat_template
from vecd.model.folder import ModelFolder


def write(folder: Path, name: str, **fields: Any) -> None:
    (folder / name).write_text(json.dumps(fields))


def read(folder: Path) -> tuple[str, dict[str, str]] | None:
    spec = read_chat_template(ModelFolder(folder))
    return None if spec is None else (spec.source, spec.tokens)


def test_the_file_comes_before_the_configuration(tmp_path):
    assert read(tmp_path) is None
    eos = {"content": "</s>", "lstrip": False}
    unlimited = int(1e30)  # as transformers writes it
    config = {"chat_template": "old", "eos_token": eos, "pad_token": None, "unk_token": "<u>"}
    write(tmp_path, "tokenizer_config.json", **config, model_max_length=unlimited)
    assert read(tmp_path) == ("old", {"eos_token": "</s>", "unk_token": "<u>"})
    write(tmp_path, "special_tokens_map.json", bos_token="<s>", eos_token="<other>")
    (tmp_path / "chat_template.jinja").write_text("new ü", encoding="utf-8")
    assert read(tmp_path) == ("new ü", {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<u>"})


@pytest.mark.parametrize(
    ("value", "source"),
    [
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tool_use", "template": "t"}], None),
        (["d", {"name": "default", "template": 5}], None),
        ("", None),
        (5, None),
        ("{{ '\\ud800' }}", "{{ '\\ud800' }}"),
        ("\ud800", None),
        ("x" * (256 * 1024), "x" * (256 * 1024)),
        ("x" * (256 * 1024 + 1), None),
    ],
)
def test_what_is_a_template(value, source, tmp_path):
    write(tmp_path, "tokenizer_config.json", chat_template=value)
    assert read(tmp_path) == (None if source is None else (source, {}))


def test_files_that_cannot_be_read_are_none(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "t", "x": ' + "[" * 5000 + "]" * 5000 + "}")
    assert read(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text("[")
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    assert read(tmp_path) is None


def test_it_survives_the_way_between_processes(tmp_path):
    write(tmp_path, "tokenizer_config.json", chat_template="t", eos_token="</s>")
    spec = read_chat_template(ModelFolder(tmp_path))
    assert load(ChatTemplateSpec, json.loads(json.dumps(dump(spec)))) == spec
