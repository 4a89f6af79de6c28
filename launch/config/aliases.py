"""What a table `[models.NAME]` says of prompts, and of the requests by an alias: how it is read, and whether the model
can do it.

Owns `Prompts`, the keys of `[models.NAME.aliases.ALIAS]`, and the checks of both against the model's card. The table is
read by `vecd.launch.config.models` before there is a card; `vecd.launch.config.plan` checks what needs one. Reads one
file of the model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from vecd.client.suggestions import closest
from vecd.gateway.types.config import DTYPES, OVERFLOWS, ROLES, AliasDefaults
from vecd.shm.card import ModelCard
from vecd.shm.model_files import read_optional

MAX_PROMPT_CHARACTERS = 4096
"""As of a prompt in a request, `vecd.gateway.types.request.MAX_PROMPT_CHARS`, whose module imports numpy."""

_SHOWN_CHARACTERS = 60
_PACKED, _WHOLE = ("binary", "ubinary"), ("int8", "uint8")
_DIMENSIONS_PER_BYTE = 8


@dataclass(frozen=True, slots=True)
class Prompts:
    """What a table says of its model's prompts."""

    by_name: Mapping[str, str] = field(default_factory=dict)
    """In addition to those of the model's files, or in their place where the name is the same."""
    default: str | None = None
    """The name of the prompt of texts that have no other; "": they have none. None: as the model's files say."""


NO_PROMPTS = Prompts()

# --- reading a table --------------------------------------------------------------------------------------------


def shown(value: object) -> str:
    """A wrong value, for a message."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def read_prompts(table: Mapping[str, object]) -> tuple[Prompts, list[str]]:
    """The prompts of a table, and what is wrong with them, each problem with its key."""
    prompts, default = table.get("prompts", {}), table.get("default_prompt")
    problems: list[str] = []
    if not isinstance(prompts, Mapping):
        problems.append(f'prompts: must be a table of texts, {{ query = "…" }} (given: {shown(prompts)})')
        prompts = {}
    for name, text in prompts.items():
        if not name:
            problems.append("prompts: a prompt must have a name")
        if why := _why_no_prompt(text):
            problems.append(f"prompts: {shown(name)}: {why}")
    if default is not None and not isinstance(default, str):
        problems.append(f'default_prompt: must be the name of a prompt, or "" for no prompt (given: {shown(default)})')
    return (NO_PROMPTS if problems else Prompts(dict(prompts), default)), problems  # type: ignore[arg-type]


def read_aliases(given: object) -> tuple[tuple[str, ...], tuple[AliasDefaults, ...], list[str]]:
    """The aliases of a table, the request defaults of those that have any, and what is wrong with them.

    `given`: a list of names, or a table of their request defaults by name, each of which may be empty.
    """
    if isinstance(given, list) and all(isinstance(name, str) for name in given):
        return tuple(given), (), []
    if not isinstance(given, Mapping):
        what = 'must be names, ["NAME"], or tables of request defaults, [models.NAME.aliases.ALIAS]'
        return (), (), [f"aliases: {what} (given: {shown(given)})"]
    found: list[AliasDefaults] = []
    problems: list[str] = []
    for name, written in given.items():
        place = f"aliases: {shown(name)}"
        if not isinstance(written, Mapping):
            problems.append(f"{place}: must be a table of {', '.join(_DEFAULTS)} (given: {shown(written)})")
            continue
        table = {key.replace("-", "_"): value for key, value in written.items()}
        wrong = [f"{place}: {why}" for why in _problems_of(table)]
        problems += wrong
        if table and not wrong:
            found.append(AliasDefaults(name, **table))
    return tuple(given), tuple(found), problems


def _problems_of(table: Mapping[str, object]) -> list[str]:
    problems = []
    for key, value in table.items():
        if key not in _DEFAULTS:
            meant = closest(key, _DEFAULTS)
            problems.append(f"{key}: there is no such request default" + (f"; did you mean {meant}?" if meant else ""))
        elif why := _DEFAULTS[key](value):
            problems.append(f"{key}: {why}")
    if "prompt" in table and "prompt_name" in table:
        problems.append("prompt, prompt_name: both choose the prompt; remove one of them")
    return problems


def _why_no_prompt(value: object) -> str:
    if not isinstance(value, str):
        return f"must be a text (given: {shown(value)})"
    if len(value) > MAX_PROMPT_CHARACTERS:
        return f"must have at most {MAX_PROMPT_CHARACTERS} characters, has {len(value)}"
    return ""


def _one_of(names: Sequence[str]) -> Callable[[object], str]:
    return lambda value: "" if value in names else f"must be one of {', '.join(names)} (given: {shown(value)})"


def _why_no_length(value: object) -> str:
    is_length = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    return "" if is_length else f"must be a whole number of at least 1 (given: {shown(value)})"


_DEFAULTS: dict[str, Callable[[object], str]] = {
    "prompt": _why_no_prompt,
    "prompt_name": lambda value: "" if isinstance(value, str) else f"must be a name (given: {shown(value)})",
    "role": _one_of(ROLES),
    "dimensions": _why_no_length,
    "dtype": _one_of(DTYPES),
    "overflow": _one_of(OVERFLOWS),
    "raw_scores": lambda value: "" if isinstance(value, bool) else f"must be true or false (given: {shown(value)})",
}
"""The request defaults by key: what is wrong with a value."""

# --- what the model can do --------------------------------------------------------------------------------------


def with_prompts(card: ModelCard, prompts: Prompts) -> tuple[ModelCard, list[str]]:
    """The card with the prompts that a table says, and what is wrong with them. Reads the file with the model's own."""
    if prompts == NO_PROMPTS:
        return card, []
    if why := _why_takes_none(card):
        return card, [f"prompts, default_prompt: {why}"]
    merged = {**dict(card.prompts), **prompts.by_name}
    default = prompts.default
    if default is None:
        own = read_optional(Path(card.folder) / "config_sentence_transformers.json")
        default = str(own.get("default_prompt_name") or "")
    elif default and default not in merged:
        return card, [f"default_prompt: the model has no prompt {shown(default)}; it has {_listed(merged)}"]
    prompt = merged.get(default, "") if default else ""
    if prompt and not card.pools_prompt:
        return card, [f"default_prompt: {_LEAVES_OUT}"]
    return replace(card, prompt=prompt, prompts=tuple(merged.items())), []


def check_defaults(defaults: AliasDefaults, card: ModelCard, *, is_matryoshka: bool, has_ranges: bool) -> list[str]:
    """What the model cannot do of an alias's request defaults. `card`: with the table's prompts. `is_matryoshka`: it
    may give fewer dimensions. `has_ranges`: there are --quantization-ranges."""
    problems = [
        *(f"{key}: {why}" for key in ("prompt", "prompt_name", "role") if (why := _check_prompt(key, defaults, card))),
        *(f"dimensions: {why}" for why in (_check_dimensions(defaults, card, is_matryoshka=is_matryoshka),) if why),
        *(f"dtype: {why}" for why in (_check_dtype(defaults, card, has_ranges=has_ranges),) if why),
    ]
    if defaults.raw_scores is not None and "rerank" not in card.capabilities:
        problems.append(f"raw_scores: is for rerankers; this model is for {_kind(card)}")
    return [f"aliases: {shown(defaults.alias)}: {problem}" for problem in problems]


def _check_prompt(key: str, defaults: AliasDefaults, card: ModelCard) -> str:
    value = getattr(defaults, key)
    if value is None:
        return ""
    if key == "role":
        has_roles = card.tokens is not None or (card.sparse is not None and card.sparse.query_weights)
        if not (has_roles or card.prompts):
            return "the model has no prompts, and treats queries as documents"
        return "" if card.pools_prompt or not any(text for _, text in card.prompts) else _LEAVES_OUT
    if why := _why_takes_none(card):
        return why
    names = dict(card.prompts)
    if key == "prompt_name" and value not in names:
        return f"the model has no prompt {shown(value)}; it has {_listed(names)}"
    return _LEAVES_OUT if not card.pools_prompt and names.get(value, value) else ""


def _check_dimensions(defaults: AliasDefaults, card: ModelCard, *, is_matryoshka: bool) -> str:
    """As `vecd.gateway.api.model_info.ModelInfo.check_dimensions`, which a request's are checked by."""
    dimensions = defaults.dimensions
    if dimensions is None:
        return ""
    if "dense" not in card.capabilities:
        return f"is for dense vectors; this model is for {_kind(card)}"
    if dimensions == card.dim:
        return ""
    if dimensions > card.dim or not is_matryoshka:
        hint = " (matryoshka = true allows fewer)" if dimensions < card.dim else ""
        return f"the model's vectors have {card.dim}, {dimensions} given{hint}"
    if card.matryoshka_dims and dimensions not in card.matryoshka_dims:
        known = ", ".join(map(str, sorted({*card.matryoshka_dims, card.dim})))
        return f"must be one of {known} (given: {dimensions}); matryoshka = true allows any"
    return ""


def _check_dtype(defaults: AliasDefaults, card: ModelCard, *, has_ranges: bool) -> str:
    """As `vecd.gateway.encoding.forms.check_forms`."""
    dtype, dimensions = defaults.dtype, defaults.dimensions or card.default_dim
    if dtype is None:
        return ""
    if "dense" not in card.capabilities:
        return f"is for dense vectors; this model is for {_kind(card)}"
    if dtype in _PACKED and dimensions % _DIMENSIONS_PER_BYTE:
        return f"{dtype} needs a number of dimensions that is a multiple of {_DIMENSIONS_PER_BYTE}, not {dimensions}"
    if dtype in _WHOLE and has_ranges and dimensions != card.dim:
        return f"{dtype} with --quantization-ranges is for whole vectors, which have {card.dim} dimensions"
    if dtype in _WHOLE and not has_ranges and not card.is_normalized:
        return f"{dtype} is for vectors of length 1, which the model's are not, or for --quantization-ranges"
    return ""


_LEAVES_OUT = "the model leaves prompts out of its pooling (include_prompt), which is not supported"


def _why_takes_none(card: ModelCard) -> str:
    """Why a model's prompts are no matter of a table; empty if they are."""
    if card.tokens is not None:
        return "a multi-vector model has templates for queries and documents, which its files say alone"
    return f"this model is for {_kind(card)}, and takes none" if card.score is not None else ""


def _kind(card: ModelCard) -> str:
    return " and ".join(card.capabilities)


def _listed(names: Mapping[str, str]) -> str:
    return ", ".join(map(shown, names)) or "none"
