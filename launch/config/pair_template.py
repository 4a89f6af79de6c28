"""How a reranker without a template for pairs in its tokenizer gets a query and a document, from its chat template.

Owns the cutting of a rendered chat template into the parts of a `PairTemplate`. The template is a program of the
model's: it is rendered in a process of its own (`vecd.gateway.tokenization.chat_template`), which then ends, so that
this process imports no Jinja. Once for each start, because the parts are the same for every pair. Called by
`vecd.launch.config.plan`.

Source of the roles, and of a prompt as the system's message: sentence-transformers 6.2, `CrossEncoder`.
"""

import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from vecd.gateway.types.config import ChatTemplateSpec
from vecd.launch.config.chat_template import read_chat_template
from vecd.shm.card import ModelCard, ModelError
from vecd.shm.heads import PairTemplate
from vecd.shm.llm_reranker_card import known_template
from vecd.shm.model_files import inner, read_object, read_optional
from vecd.shm.published import names_of

_QUERY, _DOCUMENT, _INSTRUCTION = "\ue000Query\ue001", "\ue000Document\ue001", "\ue000Instruction\ue001"
_ODD = " \t<&\"'\\{}%> Stra\u00dfe\n"
"""What templates strip, escape or rewrite."""
_TIMEOUT_S = 30.0
"""The rendering takes a second of processor time at most; the rest is the start of a process on a busy machine."""
_PLACEHOLDER = "{instruction}"


def with_pair_template(card: ModelCard) -> ModelCard:
    """The card, with the template by which its pairs become texts, if it needs one. The default prompt of a reranker
    with a template is its default instruction.

    Raises ModelError for a causal reranker whose files do not say how it gets a pair: it would rank, without an error,
    in an order that means nothing.
    """
    score = card.score
    if score is None or score.pooling != "lasttoken" or "rerank" not in card.capabilities:
        return card
    template = score.pair_template
    if template is None:
        template = _template_of(card)
        if template is None:
            return card
    return replace(card, score=replace(score, pair_template=template), prompt="", prompts=())


def _template_of(card: ModelCard) -> PairTemplate | None:
    """None if the tokenizer has a template for pairs."""
    folder = Path(card.weights_folder)
    config = read_object(folder / "config.json")
    known = known_template(config, names_of(Path(card.folder), config))
    spec = read_chat_template(folder)
    why = "there is no chat template"
    if spec is not None:
        try:
            return _cut(spec, card.prompt, _kwargs_of(folder))
        except ValueError as error:
            why = f"its chat template {error}"
    if known is not None:
        return known
    if _has_pairs(folder / "tokenizer.json"):
        return None
    raise ModelError(
        f"{folder}: nothing says how the model gets a query and a document: {why}, and its tokenizer has no template "
        "for pairs; add a chat_template.jinja that renders messages with the roles 'query' and 'document'"
    )


def _kwargs_of(folder: Path) -> dict[str, Any]:
    """Variables that sentence-transformers gives the template."""
    settings = inner(read_optional(folder / "sentence_bert_config.json"), "processing_kwargs")
    return {name: value for name, value in inner(settings, "chat_template").items() if name != "restore_suffix"}


def _cut(spec: ChatTemplateSpec, default: str, kwargs: Mapping[str, Any]) -> PairTemplate:
    """Raises ValueError, with a reason that goes on from "its chat template", for one that is no template for pairs."""
    odd_query, odd_document = _ODD + _QUERY + _ODD, _ODD + _DOCUMENT + _ODD
    system = [{"role": "system", "content": default}] if default else []
    plain, odd, instructed = _rendered(
        spec,
        [
            [*system, *_pair(_QUERY, _DOCUMENT)],
            [*system, *_pair(odd_query, odd_document)],
            [{"role": "system", "content": _INSTRUCTION}, *_pair(_QUERY, _DOCUMENT)],
        ],
        kwargs,
    )
    parts = _parts(plain)
    before, between, after = parts
    if _PLACEHOLDER in plain:
        raise ValueError(f"contains {_PLACEHOLDER}")
    if odd != before + odd_query + between + odd_document + after:
        raise ValueError("changes the query or the document: it strips, escapes or rewrites them")
    places = _parts(instructed)
    found = _default_in(parts, places)
    if found is None:
        return PairTemplate(before, between, after)
    before, between, after = (part.replace(_INSTRUCTION, _PLACEHOLDER) for part in places)
    return PairTemplate(before, between, after, found)


def _default_in(parts: tuple[str, str, str], places: tuple[str, str, str]) -> str | None:
    """What stands in `parts` where `places` have the instruction; None if these differ in more than one place."""
    different = [(part, place) for part, place in zip(parts, places, strict=True) if part != place]
    if len(different) != 1:
        return None
    part, place = different[0]
    start, found, end = place.partition(_INSTRUCTION)
    is_same = part.startswith(start) and part.endswith(end) and len(part) >= len(start) + len(end)
    if not found or _INSTRUCTION in end or not is_same:
        return None
    return part[len(start) : len(part) - len(end)]


def _pair(query: str, document: str) -> list[dict[str, str]]:
    return [{"role": "query", "content": query}, {"role": "document", "content": document}]


def _parts(text: str) -> tuple[str, str, str]:
    before, _, rest = text.partition(_QUERY)
    between, found, after = rest.partition(_DOCUMENT)
    if not found or any(mark in part for part in (before, between, after) for mark in (_QUERY, _DOCUMENT)):
        raise ValueError("does not render one 'query' and behind it one 'document'")
    return before, between, after


def _rendered(
    spec: ChatTemplateSpec, conversations: list[list[dict[str, str]]], kwargs: Mapping[str, Any]
) -> list[str]:
    lines = [
        {"source": spec.source, "tokens": spec.tokens},
        {"conversations": conversations, "kwargs": kwargs, "continue_final_message": False},
    ]
    given = b"".join(orjson.dumps(line) + b"\n" for line in lines)
    try:
        done = subprocess.run(spec.command, input=given, capture_output=True, timeout=_TIMEOUT_S, check=False)
        reply = orjson.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise ValueError(f"is not rendered within {_TIMEOUT_S:.0f} s") from None
    except orjson.JSONDecodeError:
        raise ValueError("takes more than a second or too much memory") from None
    if "error" in reply:
        raise ValueError(reply["error"])
    texts: list[str] = reply["texts"]
    return texts


def _has_pairs(path: Path) -> bool:
    """Whether the tokenizer in the file at `path` puts a token between the texts of a pair."""
    try:
        processor = inner(read_optional(path), "post_processor")
        for each in (processor, *(processor.get("processors") or ())):
            if each.get("type") in ("BertProcessing", "RobertaProcessing"):
                return True
            texts = [index for index, piece in enumerate(each.get("pair") or ()) if "Sequence" in piece]
            if len(texts) == 2 and texts[1] - texts[0] > 1:
                return True
    except (TypeError, ValueError, AttributeError) as error:
        raise ModelError(f"{path}: not a tokenizer: {error}") from None
    return False
