"""Reads the model's chat template, and the special tokens that it may name, from the tokenizer's files.

Renders nothing: `vecd.gateway.tokenization.chat_template` does, in a process of its own. Source of the files' format:
transformers' `save_pretrained` of tokenizers.
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import orjson

from vecd.base.files import JsonMapping, JsonObject
from vecd.gateway.config import ChatTemplateSpec
from vecd.model.card import ModelCard, ModelError
from vecd.model.folder import ModelFolder
from vecd.model.score_card import known_template
from vecd.model.steps import PairTemplate, TextTemplate, read_pair_template
from vecd.shm.job import JobDied, run_job

_MAX_CHARS = 256 * 1024
"""A longer template counts as none; the longest that models have is a tenth of it."""
_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_chat_template(folder: ModelFolder) -> ChatTemplateSpec | None:
    """None if there is none that can be read."""
    config = _read(folder, "tokenizer_config.json")
    source = _source_in(config.get("chat_template"))
    file = folder.weights_folder / "chat_template.jinja"
    if file.is_file():
        try:
            source = file.read_text(encoding="utf-8")
        except (OSError, ValueError):
            return None
    if not source or len(source) > _MAX_CHARS:
        return None
    named = {**_read(folder, "special_tokens_map.json"), **config}
    tokens = {name: token for name in _TOKENS if (token := _token(named.get(name))) is not None}
    return ChatTemplateSpec(source, tokens)


def _read(folder: ModelFolder, name: str) -> JsonMapping:
    with suppress(ModelError, ValueError):
        content = folder.optional(folder.place, name)
        json.dumps(content, ensure_ascii=False).encode()  # raises for lone surrogates, which no child could be told
        return content
    return {}


def _source_in(value: Any) -> str | None:
    if isinstance(value, list):
        named = {item.get("name"): item.get("template") for item in value if isinstance(item, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def _token(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


# How a model gets what its chat template makes of it: a query and a document as one text, or a text alone.
#
# The template is a program of the model's: it is rendered in a process of its own
# (`vecd.gateway.tokenization.chat_template`), which then ends, so that this process imports no Jinja. Once for each
# start, because the parts are the same for every text.
#
# Sources, of sentence-transformers 6.2: `CrossEncoder` for the roles, and for a prompt as the system's message;
# `Transformer.preprocess` and `InputFormatter` for texts alone.

_ROLES = ("query", "document")
_QUERY, _DOCUMENT, _INSTRUCTION = "\ue000Query\ue001", "\ue000Document\ue001", "\ue000Instruction\ue001"
_TEXT = "\ue000Text\ue001"
_ODD = " \t<&\"'\\{}%> Stra\u00dfe\n"
"""What templates strip, escape or rewrite."""
_TIMEOUT_S = 30.0
"""The rendering takes a second of processor time at most; the rest is the start of a process on a busy machine."""
_PLACEHOLDER = "{instruction}"
_NOT_VARIABLES = ("chat_template", "continue_final_message", "max_length", "restore_suffix", "truncation")
"""Arguments of sentence-transformers and of `apply_chat_template` that no template gets."""


def with_pair_template(card: ModelCard, folder: ModelFolder) -> ModelCard:
    """The card, with the template by which its pairs become texts, if it needs one. The default prompt of a reranker
    with a template is its default instruction. Raises ModelError for a causal reranker whose files do not say how it
    gets a pair: its order would mean nothing."""
    score = card.score
    if score is None or not card.takes_template:
        return card
    template = score.pair_template
    if folder.template:
        try:
            template = read_pair_template(folder.template, card.prompt)
        except ValueError as error:
            raise ModelError(f"{folder.path}: template {error}") from None
    elif template is None:
        template = _template_of(card, folder)
        if template is None:
            return card
    return replace(card, score=replace(score, pair_template=template), prompt="", prompts=())


def _template_of(card: ModelCard, folder: ModelFolder) -> PairTemplate | None:
    known = known_template(folder)
    spec = read_chat_template(folder)
    why = "there is no chat template"
    if spec is not None and (known is None or _is_for_pairs(spec, folder)):
        try:
            return _cut(spec, card.prompt, _variables_of(folder))
        except ValueError as error:
            why = f"its chat template {error}"
    if known is not None:
        return known
    if _has_pairs(folder):
        return None
    raise ModelError(
        f"{folder.weights_folder}: nothing says how the model gets a query and a document: {why}, and its tokenizer "
        "has no template for pairs; give it a template in a table [models.NAME], or add a chat_template.jinja that "
        "renders messages with the roles 'query' and 'document'"
    )


def _is_for_pairs(spec: ChatTemplateSpec, folder: ModelFolder) -> bool:
    """Whether the template of a known model is one for pairs: it names their roles, or sentence-transformers has saved
    the model with it. Many templates for conversations print any role, and so a pair as well."""
    names_both = all(re.search(f"[\"']{role}[\"']", spec.source) for role in _ROLES)
    return names_both or _message_setting(folder) is not None


def _message_setting(folder: ModelFolder) -> JsonObject | None:
    """What `modality_config` says of messages: with it, sentence-transformers renders every input by the chat template.
    None if the settings say nothing of messages."""
    modalities = folder.optional(folder.place, "sentence_bert_config.json").inner("modality_config")
    return modalities.inner("message") if "message" in modalities else None


def _variables_of(folder: ModelFolder) -> JsonObject:
    settings = folder.optional(folder.place, "sentence_bert_config.json")
    return settings.inner("processing_kwargs").inner("chat_template")


def _cut(spec: ChatTemplateSpec, default: str, kwargs: JsonMapping) -> PairTemplate:
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
    if odd != before + odd_query + between + odd_document + after:
        raise ValueError("changes the query or the document: it strips, escapes or rewrites them")
    places = _parts(instructed)
    found = _default_in(parts, places)
    if found is None:
        return PairTemplate(before, between, after)
    before, between, after = (part.replace(_INSTRUCTION, _PLACEHOLDER) for part in places)
    return PairTemplate(before, between, after, found)


def _default_in(parts: Sequence[str], places: Sequence[str]) -> str | None:
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


def _parts(text: str) -> list[str]:
    return _parts_of(text, [_QUERY, _DOCUMENT], "one 'query' and behind it one 'document'")


def _parts_of(text: str, marks: list[str], what: str) -> list[str]:
    """What stands around the marks, which a rendered text has once each, in this order. Raises ValueError."""
    if re.findall("|".join(marks), text) != marks:
        raise ValueError(f"does not render {what}")
    if _PLACEHOLDER in text:
        raise ValueError(f"contains {_PLACEHOLDER}")
    return re.split("|".join(marks), text)


def _rendered(spec: ChatTemplateSpec, conversations: list[list[JsonObject]], kwargs: JsonMapping) -> list[str]:
    """Raises ValueError, with a reason that goes on from "its chat template"."""
    request = {"conversations": conversations, "kwargs": kwargs, "continue_final_message": False}
    try:
        asked = orjson.dumps(request).decode()
        reply = dict(run_job("render", timeout_s=_TIMEOUT_S, request=asked, **asdict(spec)))
    except JobDied as died:
        if died.status is None:
            raise ValueError(f"is not rendered within {_TIMEOUT_S:.0f} s") from None
        raise ValueError("takes more than a second or too much memory") from None
    if "error" in reply:
        raise ValueError(reply["error"])
    texts: list[str] = reply["texts"]
    return texts


def _has_pairs(folder: ModelFolder) -> bool:
    tokenizer = folder.optional(folder.place, "tokenizer.json")
    try:
        processor = tokenizer.inner("post_processor")
        for each in (processor, *(processor.get("processors") or ())):
            if each.get("type") in ("BertProcessing", "RobertaProcessing"):
                return True
            texts = [index for index, piece in enumerate(each.get("pair") or ()) if "Sequence" in piece]
            if len(texts) == 2 and texts[1] - texts[0] > 1:
                return True
    except (TypeError, ValueError, AttributeError) as error:
        raise tokenizer.error(f"not a tokenizer: {error}") from None
    return False


# --- a text alone -------------------------------------------------------------------------------------------------


def with_text_template(card: ModelCard, folder: ModelFolder) -> ModelCard:
    """The card, with the template by which its texts are rendered, if `modality_config` has "message". Raises
    ModelError for a template whose parts are not the same for every text, and for what cannot be combined."""
    setting = None if card.score or card.is_static else _message_setting(folder)
    if setting is None:
        return card
    try:
        template = _text_template_of(card, folder, is_flat=setting.get("format") == "flat")
    except ValueError as error:
        raise ModelError(
            f"{folder.weights_folder / 'sentence_bert_config.json'}: modality_config has 'message', by which texts are "
            f"rendered by the chat template: it {error}"
        ) from None
    return replace(card, text_template=template, pools_prompt=True)


def _text_template_of(card: ModelCard, folder: ModelFolder, *, is_flat: bool) -> TextTemplate:
    """Raises ValueError, with a reason that goes on from "it"."""
    head, variables, spec = card.tokens, _variables_of(folder), read_chat_template(folder)
    if spec is None:
        raise ValueError("is missing, or cannot be read")
    if head is not None and (head.expansion_id, head.query_marker, head.document_marker) != (None, None, None):
        raise ValueError("cannot be combined with query_expansion or query_prefix")
    if card.sparse is not None and card.sparse.query_weights:
        raise ValueError("cannot be combined with static weights of queries")
    if "strftime_now" in spec.source:
        raise ValueError("may have today's date (strftime_now), so that the vectors of a text would change every day")
    for name in _NOT_VARIABLES:
        if variables.get(name, True) is not True:
            raise ValueError(f"cannot be combined with {name} {variables[name]!r:.80} (processing_kwargs)")
    template = _cut_around_text(spec, variables, is_flat=is_flat)
    of_tasks = [{"task": task, **variables} for task in _ROLES if "task" in spec.source]
    if any(_cut_around_text(spec, each, is_flat=is_flat) != template for each in of_tasks):
        raise ValueError("tells queries from documents (task), which is not supported")
    if card.prompt and len(template.variants) == 1:
        raise ValueError("has no place for a prompt (a message of the role 'system'), and the model has a default one")
    # A processor lets the tokenizer add its special tokens, unless the text begins with that of the beginning.
    has_processor = any(folder.has(folder.place, f"{kind}_config.json") for kind in ("processor", "preprocessor"))
    begins = bool(spec.tokens.get("bos_token")) and template.variants[0][0].startswith(spec.tokens["bos_token"])
    return replace(template, adds_special_tokens=has_processor and not begins)


def _cut_around_text(spec: ChatTemplateSpec, variables: JsonMapping, *, is_flat: bool) -> TextTemplate:
    def turn(role: str, text: str) -> JsonObject:
        return {"role": role, "content": text if is_flat else [{"type": "text", "text": text}]}

    odd_text, odd_prompt = _ODD + _TEXT + _ODD, _ODD + _INSTRUCTION + _ODD
    plain, odd, empty = _rendered(spec, [[turn("user", text)] for text in (_TEXT, odd_text, "")], variables)
    before, after = _parts_of(plain, [_TEXT], "one text as it is")
    strips = odd == before + odd_text.strip() + after
    if empty != before + after or not (strips or odd == before + odd_text + after):
        raise ValueError("changes a text: it escapes or rewrites it, or has another form for an empty one")
    template = TextTemplate(((before, after),), strips)
    prompts = (_INSTRUCTION, odd_prompt)
    try:
        plain, odd = _rendered(spec, [[turn("system", text), turn("user", _TEXT)] for text in prompts], variables)
    except ValueError:  # as that of Gemma 2, which refuses such messages
        return template
    before, after = _parts_of(plain, [_TEXT], "one text behind a prompt")
    strips_prompt = odd != plain.replace(_INSTRUCTION, odd_prompt)
    if strips_prompt and odd != plain.replace(_INSTRUCTION, odd_prompt.strip()):
        raise ValueError("changes a prompt: it escapes or rewrites it")
    prompted = (before.replace(_INSTRUCTION, _PLACEHOLDER), after.replace(_INSTRUCTION, _PLACEHOLDER))
    return TextTemplate((*template.variants, prompted), strips, strips_prompt)
