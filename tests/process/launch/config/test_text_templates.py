"""How a chat template becomes the parts around a text. It is rendered in a process of its own."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.cards import DENSE
from tests.support.message_checkpoints import BY_TASK, PARTS, STRIPPED
from vecd.base.files import dump, load
from vecd.launch.config.templates import with_text_template
from vecd.model.card import ModelCard, ModelError
from vecd.model.folder import ModelFolder
from vecd.model.steps import ScoreHead, SparseHead, TextTemplate, TokenHead

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
USER = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


@pytest.fixture
def card(tmp_path: Path) -> Callable[..., ModelCard]:
    """The card of a model whose folder has a chat template, and nothing else that matters. `settings`: beside
    `modality_config`."""

    def make(template: str | None = None, format: str | None = "flat", files: Any = None, **settings: Any) -> ModelCard:
        setting = {"method": "forward", "method_output_name": "last_hidden_state", "format": format}
        config = {"modality_config": {"message": setting}, **settings}
        for name, content in {"sentence_bert_config": config, **(files or {})}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template)
        return replace(DENSE, folder=str(tmp_path), pools_prompt=False)

    return make


def templated(card: ModelCard) -> ModelCard:
    return with_text_template(card, ModelFolder(Path(card.folder)))


def template_of(card: ModelCard) -> TextTemplate:
    made = templated(card)
    assert made.pools_prompt
    assert load(ModelCard, json.loads(json.dumps(dump(made)))) == made
    assert made.text_template is not None
    return made.text_template


def test_the_parts_are_what_stands_around_the_text(card):
    before, after = "<|im_start|>user\n", "<|im_end|>\n"
    prompted = "<|im_start|>system\n{instruction}<|im_end|>\n" + before
    assert template_of(card(CHATML)) == TextTemplate(((before, after), (prompted, after)))


def test_contents_in_parts_and_a_default_instruction(card):
    settings = {"processing_kwargs": {"chat_template": {"add_generation_prompt": True}}}
    found = template_of(card(PARTS, "structured", **settings))
    before, after = "{}<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    system = "<|im_start|>system\n" + before
    prompts = ("Represent the input.", "{instruction}")
    assert found == TextTemplate(tuple((system.format(prompt), after) for prompt in prompts))


def test_a_template_may_strip(card):
    found = template_of(card(STRIPPED, files={"tokenizer_config": {"bos_token": "<bos>"}}))
    parts = ("<bos><start_of_turn>user\n", "<end_of_turn>\n")
    prompted = ("<bos><start_of_turn>user\n{instruction}\n\n", parts[1])
    assert found == TextTemplate((parts, prompted), strips=True)
    assert template_of(card(CHATML.replace("content }}", "content | trim }}"))).strips_prompt


def test_a_template_without_a_place_for_a_prompt(card):
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + USER
    assert template_of(card(template)).variants == (("", ""),)
    with pytest.raises(ModelError, match=r"it has no place for a prompt .* the model has a default one"):
        templated(replace(card(template), prompt="Find"))
    assert template_of(card(USER)).variants == (("", ""), ("", ""))  # leaves prompts out, as sentence-transformers does


@pytest.mark.parametrize(
    ("files", "adds"),
    [
        ({}, False),
        ({"preprocessor_config": {}}, True),
        ({"processor_config": {}, "tokenizer_config": {"bos_token": "<|im_start|>"}}, False),
    ],
)
def test_a_processor_adds_special_tokens(files, adds, card):
    assert template_of(card(CHATML, files=files)).adds_special_tokens == adds


@pytest.mark.parametrize(
    ("template", "settings", "reason"),
    [
        (None, {}, "it is missing, or cannot be read"),
        (USER.replace("content", "content | e"), {}, "it changes a text: it escapes or rewrites it"),
        (CHATML.replace("content", "content | e if m.role == 'system' else m.content"), {}, "it changes a prompt"),
        (USER + "{{ '' if messages[0].content else 'none' }}", {}, "another form for an empty one"),
        (BY_TASK, {}, r"it tells queries from documents \(task\)"),
        (USER + "{instruction}", {}, r"it contains \{instruction\}"),
        (USER + USER, {}, "it does not render one text"),
        ("{{ raise_exception('roles must alternate') }}", {}, "it refuses the conversation: roles must alternate"),
        (USER + "{{ strftime_now('%d %b %Y') }}", {}, r"it may have today's date \(strftime_now\)"),
        (
            CHATML,
            {"processing_kwargs": {"chat_template": {"truncation": False}}},
            r"it cannot be combined with truncation False \(processing_kwargs\)",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(template, settings, reason, card):
    with pytest.raises(ModelError, match=reason) as refused:
        templated(card(template, **settings))
    says = "sentence_bert_config.json: modality_config has 'message', by which texts are rendered by the chat template"
    assert f"{says}: it " in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": TokenHead((), query_tokens=8, expansion_id=3)}, "query_expansion"),
        ({"tokens": TokenHead((), query_marker=3)}, "query_prefix"),
        ({"sparse": SparseHead((), query_weights="weights.json")}, "static weights of queries"),
    ],
)
def test_what_is_not_combined_with_messages(change, reason, card):
    with pytest.raises(ModelError, match=reason):
        templated(replace(card(CHATML), **change))


def test_other_models_have_none(card):
    plain = card(CHATML, modality_config={"text": {}})
    assert templated(plain) is plain
    scored = replace(card(CHATML), score=ScoreHead(("LABEL_0",), "sigmoid"))
    assert templated(scored) is scored
