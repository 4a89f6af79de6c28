"""How a chat template becomes the parts of a pair's text. It is rendered in a process of its own."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.cards import RERANKER
from vecd.launch.config.templates import with_pair_template
from vecd.model.card import ModelCard, ModelError
from vecd.model.folder import ModelFolder
from vecd.model.score_card import known_template
from vecd.model.steps import PairTemplate, ScoreHead

QUERY = '{{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}'
DOCUMENT = QUERY.replace('"query"', '"document"')
SYSTEM = (
    '{{ messages | selectattr("role", "eq", "system") | map(attribute="content") | first | default("Find passages") }}'
)


@pytest.fixture
def card(tmp_path: Path) -> Callable[..., ModelCard]:
    """The card of a causal reranker whose folder has a chat template, and nothing else that matters."""

    def make(template: str | None = None, config: Any = (), **files: Any) -> ModelCard:
        head = ScoreHead(("LABEL_0",), "sigmoid", "lasttoken")
        config = {"model_type": "qwen3", "hidden_size": 8, "vocab_size": 9, **dict(config)}
        (tmp_path / "model.safetensors").touch()
        for name, content in {"config": config, "tokenizer": {}, **files}.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        if template is not None:
            (tmp_path / "chat_template.jinja").write_text(template)
        return replace(RERANKER, folder=str(tmp_path), score=head)

    return make


def templated(card: ModelCard) -> ModelCard:
    return with_pair_template(card, ModelFolder(Path(card.folder)))


def template_of(card: ModelCard) -> Any:
    made: Any = templated(card)
    assert (made.prompt, made.prompts) == ("", ())
    return made.score.pair_template


def test_the_parts_are_what_stands_around_the_texts(card):
    found = template_of(card(f"<s>\n<Q>: {QUERY}\n<D>: {DOCUMENT}</s>\n\n"))
    assert found == PairTemplate("<s>\n<Q>: ", "\n<D>: ", "</s>\n")


def test_special_tokens_may_be_named(card):
    found = template_of(card(f"{{{{ bos_token }}}}{QUERY}|{DOCUMENT}", tokenizer_config={"bos_token": "<bos>"}))
    assert found == PairTemplate("<bos>", "|", "")


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        (f"[{SYSTEM}] {QUERY} / {DOCUMENT} .", ("[{instruction}] ", " / ", " .")),
        (f"{QUERY} / {DOCUMENT} . {SYSTEM}!", ("", " / ", " . {instruction}!")),
        (f"{QUERY} ({SYSTEM}) {DOCUMENT} .", ("", " ({instruction}) ", " .")),
    ],
)
def test_the_system_s_message_is_the_instruction(template, parts: tuple[str, str, str], card):
    assert template_of(card(template)) == PairTemplate(*parts, "Find passages")


def test_the_model_s_prompt_is_the_default_instruction(card):
    prompted = replace(card(f"[{SYSTEM}] {QUERY} / {DOCUMENT} ."), prompt="Find code", prompts=(("x", "Find code"),))
    assert template_of(prompted) == PairTemplate("[{instruction}] ", " / ", " .", "Find code")


def test_an_optional_instruction_has_no_default(card):
    optional = '{% if messages[0]["role"] == "system" %}{{ messages[0]["content"] }} and {% endif %}'
    source = f"{optional}{QUERY} / {DOCUMENT}"
    assert template_of(card(source)) == PairTemplate("", " / ", "")
    assert template_of(replace(card(source), prompt="Find")) == PairTemplate("{instruction} and ", " / ", "", "Find")


def test_variables_of_sentence_transformers_reach_the_template(card):
    settings = {"processing_kwargs": {"chat_template": {"add_generation_prompt": True, "restore_suffix": False}}}
    source = f"{QUERY}|{DOCUMENT}{{% if add_generation_prompt %}}<a>{{% endif %}}"
    assert template_of(card(source, sentence_bert_config=settings)) == PairTemplate("", "|", "<a>")


def test_contents_in_parts_are_found(card):
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text }}{% endfor %}"
    assert template_of(card(source)) == PairTemplate("<query>", "<document>", "")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (QUERY.replace("first", "first | trim") + DOCUMENT, "changes the query or the document"),
        (QUERY + DOCUMENT.replace("first", "first | upper"), "does not render one 'query'"),
        (DOCUMENT + QUERY, "does not render one 'query' and behind it one 'document'"),
        (QUERY + QUERY + DOCUMENT, "does not render one 'query'"),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", "does not render"),
        (QUERY + "{instruction}" + DOCUMENT, r"contains \{instruction\}"),
        ("{{ raise_exception('roles must alternate') }}", "refuses the conversation: roles must alternate"),
        (
            "{% for a in range(99999999) %}{% for b in range(99999999) %}x{% endfor %}{% endfor %}",
            "fails on|takes more",
        ),
        ("{{ 1", "cannot be compiled"),
        (None, "there is no chat template"),
    ],
)
def test_a_template_that_is_none_for_pairs_is_refused(template, reason, card):
    with pytest.raises(ModelError, match=reason) as refused:
        templated(card(template))
    assert "add a chat_template.jinja" in str(refused.value)


def test_a_known_name_stands_in_for_a_template_of_conversations(card):
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    found = template_of(card(template, {"_name_or_path": "tomaarsen/Qwen3-Reranker-0.6B-seq-cls"}))
    assert found is not None
    assert found.instruction == "Given a web search query, retrieve relevant passages that answer the query"


CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
OF_CHATML = PairTemplate("<query>", "</s><document>", "</s>")
KNOWN = {"_name_or_path": "tomaarsen/Qwen3-Reranker-0.6B-seq-cls"}


def test_a_known_model_s_template_comes_before_one_that_prints_any_role(card):
    made = card(CHATML, KNOWN)
    found = template_of(made)
    assert found == known_template(ModelFolder(Path(made.folder)))
    assert found.between == "\n<Document>: "
    assert template_of(card(CHATML)) == OF_CHATML  # as sentence-transformers renders it for a model of another name


def test_a_known_model_s_own_template_for_pairs_comes_first(card):
    assert template_of(card(f"{QUERY}|{DOCUMENT}", KNOWN)) == PairTemplate("", "|", "")
    saved = {"modality_config": {"message": {"method": "forward", "method_output_name": "logits", "format": "flat"}}}
    assert template_of(card(CHATML, KNOWN, sentence_bert_config=saved)) == OF_CHATML


@pytest.mark.parametrize(
    "processor",
    [
        {"type": "TemplateProcessing", "pair": [{"Sequence": {}}, {"SpecialToken": {}}, {"Sequence": {}}]},
        {"type": "Sequence", "processors": [{"type": "ByteLevel"}, {"type": "RobertaProcessing"}]},
    ],
)
def test_the_tokenizer_s_own_template_is_enough(processor, card):
    found = card(None, tokenizer={"post_processor": processor})
    assert templated(found) is found


@pytest.mark.parametrize("change", [{"pooling": "cls"}, {"pair_template": PairTemplate("a", "b", "c")}])
def test_other_models_need_none(change, card):
    given = replace(card(None), score=ScoreHead((), "sigmoid", **{"pooling": "lasttoken", **change}))
    assert templated(given) == given
    assert templated(replace(given, score=None)).score is None
