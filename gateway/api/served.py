"""The served models as dialects see them: names, prompts and limits, and which model a name means, the same in every
dialect. A reload makes another. Pure, but for the log."""

import logging
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import PurePath
from typing import TypeVar
from urllib.parse import quote

from vecd.gateway.config import AliasDefaults, GatewayConfig
from vecd.gateway.dispatch.residence import Residence
from vecd.gateway.errors import ApiError, BadRequest, ModelNotFound, Unavailable, quoted
from vecd.gateway.request import Identity, Overflow, Role
from vecd.gateway.tokenization.tokenizer import NO_VOCABULARY, TokenVocabulary

# The purposes of texts that clients name, each with the names of prompts to look for, in this order. Sources: Cohere's
# and Voyage's `input_type`, Jina's `task`, Nomic's and sentence-transformers' prompts.
_QUERY = ("query", "search_query", "retrieval.query", "s2p_query", "web_search_query")
_DOCUMENT = ("document", "passage", "search_document", "retrieval.passage", "corpus")
_PURPOSES = {
    **dict.fromkeys(_QUERY, _QUERY),
    **dict.fromkeys(_DOCUMENT, _DOCUMENT),
    "classification": ("classification",),
    "clustering": ("clustering", "separation"),
    "separation": ("separation", "clustering"),
    "text-matching": ("text-matching", "STS", "sts"),
    "code.query": ("code.query", *_QUERY),
    "code.passage": ("code.passage", *_DOCUMENT),
}
_RETRIEVAL = frozenset((*_QUERY, *_DOCUMENT, "code.query", "code.passage"))
PURPOSES = tuple(_PURPOSES)
"""The purposes that are known for every model."""


def _meant_by(purpose: str) -> tuple[str, ...]:
    return (purpose, *_PURPOSES.get(purpose, ()))


def _adapters_for(purpose: str) -> list[str]:
    """What adapters for texts of a purpose may be called, the nearest first: the purpose's names, and each without what
    is behind its dot. Without separators, for which published names have any."""
    return [_SEPARATORS.sub("", name) for each in _meant_by(purpose) for name in (each, each.partition(".")[0])]


_SEPARATORS = re.compile(r"[._-]")
_NO_TEXTS = {"image": "this server embeds texts"}

_Named = TypeVar("_Named")

_MAX_LISTED_CHARS = 32
_MAX_LISTED = 20
_TAG = "latest"
"""Ollama's clients append it to every name."""
_VERSION = re.compile(r"(?:v|q|iq|f|fp|bf|int)?[0-9].*", re.IGNORECASE)
"""A version, a size or a type behind a colon, as in Ollama's tags ("v1.5", "335m-v1-fp16", "q8_0", "bf16"). It does not
match a misspelt name of a prompt ("query2")."""


def listed(names: Iterable[str]) -> str:
    """For an error message; cut, because a model may have hundreds of prompts."""
    shown = [f"'{name[:_MAX_LISTED_CHARS]}'" for name in names]
    more = f" and {len(shown) - _MAX_LISTED} more" if len(shown) > _MAX_LISTED else ""
    return ", ".join(shown[:_MAX_LISTED]) + more


@dataclass(eq=False)
class ModelInfo:
    """One of them. What is configured counts more than what its card says."""

    config: GatewayConfig
    residence: Residence
    """Whether it is loaded."""
    identity: Identity
    created_at: int
    """Seconds since 1970."""
    generation: int = 0
    """Of the configuration, whose `vecd.gateway.service.Service` answers for the model."""
    least_tokens: int = 1
    """The smallest limit on an input's tokens: its special tokens, and one of the text."""
    vocabulary: TokenVocabulary = NO_VOCABULARY
    defaults: AliasDefaults | None = None
    """Those of the alias by which the model is seen; None for every other name. See `by_alias`."""

    def __post_init__(self) -> None:
        config, card, defaults = self.config, self.config.card, self.defaults
        self.card, self.outputs = card, card.outputs
        self.capabilities = frozenset(card.capabilities)
        self.model = config.model
        self.names = (config.model, *config.aliases)
        self.is_strict = config.unknown_model == "refuse"
        self.is_dense = card.capabilities[0] == "dense"  # which is the first, if it is one of them
        self.prompts = dict(card.prompts)
        """By the names in the model's files."""
        self.overflow = Overflow((defaults and defaults.overflow) or config.overflow)
        self.default_prompt = card.prompt
        self.model_prompt: str | None = None
        """The model's own default prompt, where `default_prompt` is that of an alias; None: it is the model's."""
        if defaults is not None and (prompt := self._prompt_by(defaults)) is not None:
            self.default_prompt, self.model_prompt = prompt, card.prompt

    def by_alias(self, defaults: AliasDefaults) -> "ModelInfo":
        """The model as it is seen by an alias with request defaults: what they say is its own default there."""
        return replace(self, defaults=defaults, identity=self.identity.by_alias.get(defaults.alias, self.identity))

    def _prompt_by(self, defaults: AliasDefaults) -> str | None:
        """The default prompt by an alias; None: the model's. A multi-vector model has templates for both roles, which
        have their prompts."""
        if defaults.prompt is not None:
            return defaults.prompt
        if defaults.prompt_name is not None:
            return self.checked(self.prompts[defaults.prompt_name], "prompt_name")
        return None if defaults.role is None or self.card.tokens is not None else self.prompt_for(defaults.role)

    def by_name(self, name: str) -> "ModelInfo":
        found = (each for each in self.config.alias_defaults if each.alias == name)
        return next((self.by_alias(defaults) for defaults in found), self)

    @property
    def expires_at(self) -> float | None:
        """When it is unloaded if no request comes, in seconds since 1970; None: it stays."""
        expires_in_s = self.residence.expires_in_s
        return None if expires_in_s is None else time.time() + expires_in_s

    @property
    def num_dimensions(self) -> int:
        """Of a dense vector in the response to a request that does not say."""
        by_alias = None if self.defaults is None else self.defaults.dimensions
        return by_alias or self.card.default_dim

    def role_of(self, purpose: str | None) -> Role | None:
        """What texts of a purpose are; None for other purposes than retrieval."""
        if purpose in (*_QUERY, "code.query"):
            return Role.QUERY
        return Role.DOCUMENT if purpose in _RETRIEVAL else None

    def can(self, needs: Sequence[str]) -> bool:
        """Whether the model has one of these capabilities, or none is needed."""
        return not needs or not self.capabilities.isdisjoint(needs)

    def what_it_is(self) -> str:
        """For an error message."""
        return f"This server's model is for: {', '.join(self.card.capabilities)}"

    def is_suffix(self, suffix: str) -> bool:
        """Whether this may stand behind a name of the model: Ollama's tag, or what chooses a prompt."""
        return suffix == _TAG or suffix in self.prompts or suffix in _PURPOSES

    def prompt_of_model_name(self, name: str | None, param: str = "model") -> str | None:
        """The prompt that a model's name selects behind its last colon, as in "minilm:query". None if it selects none,
        as most names with colons: "nomic-embed-text:v1.5", "org/model:latest".

        Raises ModelNotFound for another model's name if names are strict, and BadRequest for a misspelt prompt: this
        model's name with something behind the colon that is neither a version nor one of its prompts, by the field
        `param`.
        """
        if name is None or (":" not in name and not self.is_strict) or name in self.names:
            return None
        base, colon, suffix = name.rpartition(":")
        if colon and (not self.is_strict or base in self.names) and self.is_suffix(suffix):
            return None if suffix == _TAG else self.prompt_for(suffix, param)
        if self.is_strict:
            raise ModelNotFound(name, listed(self.names))
        if colon and self.prompts and base in self.names and not _VERSION.fullmatch(suffix):
            raise self._unknown_prompt(suffix, param)
        return None

    def prompt_named(self, name: str, param: str) -> str:
        """The model's prompt of exactly that name. Raises BadRequest, which names the field `param`, also for the name
        of a purpose that the model's task is not for, if that is queries or documents."""
        if self.role_of(self.card.task) is not None:  # adapters for other tasks have prompts for both
            self._check_task(name, param)
        if name not in self.prompts:
            raise self._unknown_prompt(name, param)
        return self.checked(self.prompts[name], param)

    def _unknown_prompt(self, name: str, param: str) -> BadRequest:
        known = listed(self.prompts) or "none"
        return BadRequest(f"'{param}': the model has no prompt {quoted(name)}; it has {known}", param=param)

    def prompt_for(self, purpose: str, param: str = "input_type") -> str | None:
        """The model's prompt for texts of a purpose: the prompt of that name, or of a name that means the same.

        If the model has no such prompt: None, which means the default prompt; by an alias with a prompt the text of the
        model's own default prompt. For queries and documents it is "" instead if there is a default prompt, because
        that may be meant for the other of the two; sentence-transformers' `encode_query` and `encode_document` do the
        same. Raises BadRequest, which names the field `param`, for an unknown purpose, and for one that the adapter in
        the model's weights is not for.
        """
        self._check_task(purpose, param)
        for name in _meant_by(purpose):
            if name in self.prompts:
                return self.checked(self.prompts[name], param)
        if purpose not in _PURPOSES:
            if purpose in _NO_TEXTS:
                raise BadRequest(f"'{param}' '{purpose}' is not supported: {_NO_TEXTS[purpose]}", param=param)
            known = listed((*self.prompts, *(purpose for purpose in PURPOSES if purpose not in self.prompts)))
            raise BadRequest(f"'{param}' must be one of {known}, is {quoted(purpose)}", param=param)
        if self.model_prompt is not None:  # None would mean that of the alias, and the request names another purpose
            return "" if purpose in _RETRIEVAL else self.model_prompt
        return "" if self.default_prompt and purpose in _RETRIEVAL else None

    def is_for(self, purpose: str) -> bool:
        """Whether the adapter or the route of the model, if it has one, is for texts of a purpose."""
        task = self.card.task
        return task is None or purpose not in _PURPOSES or _SEPARATORS.sub("", task) in _adapters_for(purpose)

    def _check_task(self, purpose: str, param: str) -> None:
        if not self.is_for(purpose):
            task = self.card.task
            has = f"that of '{task}'" if task else "none"
            raise BadRequest(
                f"'{param}' {quoted(purpose)} needs another adapter or route: model '{self.model}' has {has}",
                param=param,
            )

    def checked(self, prompt: str, param: str) -> str:
        """`prompt`. Raises BadRequest if it is not empty and this model takes none."""
        if prompt and not self.card.pools_prompt:
            raise BadRequest(
                f"'{param}': this model leaves prompts out of its pooling (include_prompt), which is not supported",
                param=param,
            )
        return prompt

    def check_max_tokens(self, max_tokens: int, param: str) -> int:
        """Raises BadRequest, which names the field `param`, if that limit on tokens leaves no room for a text."""
        if max_tokens < self.least_tokens:
            raise BadRequest(
                f"'{param}' must be at least {self.least_tokens}, with the special tokens around a text, "
                f"is {max_tokens}",
                param=param,
            )
        return max_tokens

    def check_dimensions(self, dimensions: int, param: str) -> int | None:
        """The requested `dimensions`; None for those of a request that does not say. Raises BadRequest, with OpenAI's
        message where it has one."""
        card = self.card
        if dimensions == card.dim:
            return dimensions if card.truncate_dim else None
        if not self.config.is_matryoshka:
            hint = " (--matryoshka allows fewer)" if 1 <= dimensions < card.dim else ""
            raise BadRequest(
                f"This model does not support specifying dimensions. Its vectors have {card.dim}, '{param}' is "
                f"{dimensions}: leave it out, or set {card.dim}{hint}",
                param=param,
            )
        if card.matryoshka_dims and dimensions not in card.matryoshka_dims:
            known = ", ".join(map(str, sorted({*card.matryoshka_dims, card.dim})))
            raise BadRequest(
                f"'{param}' must be one of {known}, is {dimensions} (--matryoshka allows any)", param=param
            )
        if not 1 <= dimensions <= card.dim:
            raise BadRequest(f"'{param}' must be 1 to {card.dim}, is {dimensions}", param=param)
        return dimensions


# What the name of a model in a request means, where several are served. It is only ever looked up, and finds a model in
# one of these ways, the first that finds one. Those behind the first two find none where they would find two, because
# vectors of the wrong model are worse than an error.
#
#     the name of a model, in the configuration
#     one of a model's aliases
#     the last part of the model's folder
#     one of these, in other letters of case
#     the same without the organization, where the configuration has one or where the request has one: "org/name"
#
# Then the same without what is behind the last colon: Ollama's `:latest`, a version, or the name of a prompt.

log = logging.getLogger("vecd.gateway")

PREFIX = "/m/"
"""Of a path that names its model: /m/NAME/v1/embeddings."""
HEADER = "x-vecd-model"
"""In a request it names the model; in a response it is the name of the model that has answered."""

_MAX_CHARS = 1024
"""A longer name is unknown, and is not looked at."""
_MAX_LIMITED = 1000
"""Sets of models, of keys that reach some alone, that are kept."""
_MAX_PARTS = 16
"""Of a path, those that may belong to a name."""


class Models:
    """The served models, in the order of the configuration, or those of them that an API key reaches. An alias that has
    request defaults finds its model with these. May be called in any thread."""

    def __init__(self, models: Sequence[ModelInfo], *, refuses_unknown: bool, is_complete: bool = True) -> None:
        """`is_complete`: False while models of the configuration are still to come; until then no other model answers
        for them."""
        self.all = tuple(models)
        self.is_complete = is_complete
        self._refuses_unknown = refuses_unknown
        self.only = lru_cache(_MAX_LIMITED)(self._only)
        seen = {each.alias: model.by_alias(each) for model in models for each in model.config.alias_defaults}
        self.are_several = len(models) > 1 or bool(seen) or not is_complete
        """Requests choose among them, or among aliases."""
        names = [(model.model, model) for model in models]
        aliases = [(alias, seen.get(alias, model)) for model in models for alias in model.config.aliases]
        folders = [(PurePath(model.card.folder).name, model) for model in models]
        self._exact = {**_unique(folders), **dict(aliases), **dict(names)}
        self._folded = _unique((name.casefold(), model) for name, model in (*names, *aliases, *folders))
        self._short = _unique((_without_organization(name.casefold()), model) for name, model in (*names, *aliases))

        bases: dict[str, dict[str, ModelInfo]] = {}
        for name, model in (*names, *aliases):
            if task := model.card.task:
                base = name.casefold().removesuffix(f"/{task.casefold()}")
                bases.setdefault(base, {}).setdefault(task, model)
        self._by_task = {**_unique((_without_organization(base), tasks) for base, tasks in bases.items()), **bases}

    def _only(self, names: tuple[str, ...]) -> "Models":
        """Those of the models that have these names in the configuration; there may be none."""
        models = [model for model in self.all if model.model in names]
        return Models(models, refuses_unknown=self._refuses_unknown, is_complete=self.is_complete)

    def find(self, name: str) -> ModelInfo | None:
        if len(name) > _MAX_CHARS:
            return None
        found = self._find_whole(name)
        if found is None and ":" in name:
            base, _, suffix = name.rpartition(":")
            found = self._find_whole(base)
            if found is not None and self._refuses_unknown and not found.is_suffix(suffix):
                return None
        return found

    def _find_whole(self, name: str) -> ModelInfo | None:
        found = self._exact.get(name)
        if found is not None or not name:
            return found
        folded = name.casefold()
        # Two names with different organizations are two models.
        short = _without_organization(folded)
        return self._folded.get(folded) or (self._folded.get(short) if short else self._short.get(folded))

    def own_name(self, model: ModelInfo, name: str) -> str:
        """`name` as the model's own `prompt_of_model_name` understands it, whatever it means here: one of
        its names, and behind a colon what may choose a prompt."""
        if name in model.names:
            return name
        if ":" in name and len(name) <= _MAX_CHARS and self._find_whole(name) is not model:
            base, _, suffix = name.rpartition(":")
            if model.is_suffix(suffix) or self._find_whole(base) is model:
                return f"{base if base in model.names else model.model}:{suffix}"
        return model.model if model.defaults is None else model.defaults.alias

    def _of_base(self, name: str, purpose: str, word: str) -> ModelInfo | None:
        """Where `name` is that of a base of which adapters are served, as "base/task": the one for the purpose. None:
        it is no such name, or the base is served, too, and the purpose is none of those known. Raises BadRequest, which
        names the field `word`, and Unavailable while models are still to come."""
        exact, (base, _, suffix) = self._exact.get(name), name[:_MAX_CHARS].partition(":")
        tasks = self._by_task.get(base.casefold()) if exact is None or exact.card.task is not None else None
        if not tasks:
            return None
        purpose = purpose or ("" if suffix == _TAG else suffix)
        by_name = {_SEPARATORS.sub("", task): model for task, model in tasks.items()}
        if found := next((by_name[each] for each in _adapters_for(purpose) if each in by_name), None):
            return found
        if self.find(base) is not None and purpose not in _PURPOSES:
            return None
        if not self.is_complete:  # the adapter may be one of those that are still to come
            raise self.refusal("")
        given = f", is {quoted(purpose)}" if purpose else ""
        raise BadRequest(
            f"'{word}' must be for one of the adapters of '{base}' that are served: {listed(tasks)}{given}",
            param=word,
        )

    def choose(
        self,
        name: str | None,
        needs: Sequence[str],
        *,
        purpose: str = "",
        word: str = "task",
        refuses_unknown: bool = False,
    ) -> ModelInfo:
        """The model for a request that names one, or none: then, and for an unknown name if that is not refused, it is
        the first that has the first of the capabilities `needs`, or else the second, and so on; the first of all where
        none is needed, and where no model has one. `purpose`: of the texts, which chooses among the adapters of the
        base that is named. `refuses_unknown`: whatever the policy is. Raises ModelNotFound, BadRequest, and Unavailable
        while models are still to come."""
        found = (self._of_base(name, purpose, word) or self.find(name)) if name else None
        if name and found is None:  # "base/task" of a base that the client names otherwise, or of a task not served
            base, _, task = name.rpartition("/")
            found = self._of_base(base, task, "model")
        if found is not None:
            return found
        if not self.is_complete:
            raise self.refusal("")
        if name and (refuses_unknown or self._refuses_unknown):
            known = [own for model in self.able(needs) or self.all for own in model.names]
            raise ModelNotFound(name, listed(known))
        able = (model for need in needs for model in self.able((need,)))
        default = next(able, self.all[0])
        if name:
            log_stand_in(default.model)
        return default

    def refusal(self, name: str) -> ApiError:
        """For an unknown name that is always refused. It lists no model, because the client may have no key."""
        if self.is_complete:
            return ModelNotFound(name, "those that GET /v1/models lists")
        return Unavailable("The server is starting; models are loading", retry_after_s=1, code="not_ready")

    def able(self, needs: Sequence[str]) -> tuple[ModelInfo, ...]:
        """The models that have one of the capabilities; all, if none is needed."""
        return tuple(model for model in self.all if model.can(needs))

    def split(self, path: str) -> tuple[str, str] | None:
        """The name and the rest of a path that begins with PREFIX; None if no model has such a name.

        A name may have slashes. One that is written as it is configured comes first, the longest of several; then the
        shortest that finds a model, because what follows is the path of a route.
        """
        readings = readings_of(path)
        exact = [reading for reading in readings if reading[0] in self._exact]
        found = (reading for reading in readings if self.find(reading[0]) is not None)
        return exact[-1] if exact else next(found, None)


@cache
def log_stand_in(model: str) -> None:
    """Log once that a model answers in the place of others, whose names are the client's, and not for the log."""
    log.info("requests name a model that is not configured; %s answers in its place", model)


def readings_of(path: str) -> list[tuple[str, str]]:
    """What a path that begins with PREFIX may mean: a name, and the path behind it. The shortest name comes first."""
    parts = path.removeprefix(PREFIX).split("/")
    ends = range(1, min(len(parts), _MAX_PARTS) + 1)
    return [("/".join(parts[:end]), "/" + "/".join(parts[end:])) for end in ends]


def header_value(name: str) -> str:
    return name if name.isascii() and name.isprintable() else quote(name)


def _without_organization(name: str) -> str:
    """The second part of "org/name"; "" for another name."""
    organization, _, rest = name.partition("/")
    return rest if organization.strip(".") and "/" not in rest else ""


def _unique(named: Iterable[tuple[str, _Named]]) -> dict[str, _Named]:
    """By name, without the empty name and those of several."""
    found: dict[str, _Named] = {}
    several: set[str] = set()
    for name, model in named:
        if found.setdefault(name, model) is not model:
            several.add(name)
    return {name: model for name, model in found.items() if name and name not in several}
