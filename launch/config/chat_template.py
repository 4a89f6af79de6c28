"""Reads the model's chat template, and the special tokens that it may name, from the tokenizer's files.

Renders nothing: `vecd.gateway.tokenization.chat_template` does, in a process of its own. Called by
`vecd.launch.config.plan`. Source of the files' format: transformers' `save_pretrained` of tokenizers.
"""

from pathlib import Path
from typing import Any

import orjson

from vecd.gateway.types.config import ChatTemplateSpec
from vecd.launch.base.programs import command_of

_MAX_CHARS = 256 * 1024
"""A longer template counts as none; the longest that models have is a tenth of it."""
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_chat_template(weights_folder: Path) -> ChatTemplateSpec | None:
    """The template in `chat_template.jinja`, or else in `tokenizer_config.json`; None if there is none that can be
    read."""
    config = _read(weights_folder / "tokenizer_config.json")
    source = _source_in(config.get("chat_template"))
    file = weights_folder / "chat_template.jinja"
    if file.is_file():
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
    if not source or len(source) > _MAX_CHARS:
        return None
    named = {**_read(weights_folder / "special_tokens_map.json"), **config}
    tokens = {name: token for name in _TOKENS if (token := _token(named.get(name))) is not None}
    return ChatTemplateSpec(source, tokens, tuple(command_of("vecd.gateway.tokenization.chat_template")))


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is none. A tokenizer without these files works, too."""
    try:
        content = orjson.loads(path.read_bytes())  # refuses lone surrogates, which no child could be told
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _source_in(value: Any) -> str | None:
    """One template, or that of the name "default" in a list of several."""
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _token(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
