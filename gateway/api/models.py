"""What the name of a model in a request means, where several are served.

Owns the rules: which names find a model, which model is the default of a kind, and what becomes of an unknown name.
Pure, but for the log. A name is only ever looked up, and is part of no path. `vecd.gateway.service` makes a `Models`
whenever another generation begins to serve; for an API key that reaches some models alone there is a `Models` of these,
so that all others are unknown names. Called there for the path and the header that may name a model, and by
`vecd.gateway.api.handlers` for bodies.

A name finds a model in one of these ways, the first that finds one. Those behind the first two find none where they
would find two, because vectors of the wrong model are worse than an error.

    the name of a model, in the configuration
    one of a model's aliases
    the last part of the model's folder
    one of these, in other letters of case
    the same without the organization, where the configuration has one or where the request has one: "org/name"

Then the same without what is behind the last colon: Ollama's `:latest`, a version, or the name of a prompt.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar
from urllib.parse import quote

from vecd.gateway.api.model_info import ModelInfo, listed
from vecd.gateway.types.errors import ApiError, ModelNotFound, Unavailable

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


class _Described(Protocol):
    model_info: ModelInfo


M = TypeVar("M", bound=_Described)


class Models(Generic[M]):
    """The served models, in the order of the configuration. Immutable, but for what was logged. May be
    called in any thread."""

    def __init__(
        self,
        models: Sequence[M],
        *,
        refuses_unknown: bool,
        by_alias: Sequence[M] = (),
        is_complete: bool = True,
        logged: set[str] | None = None,
    ) -> None:
        """`by_alias`: for each alias that has request defaults its model once more, with `ModelInfo.by_alias`, which is
        what the alias finds. `is_complete`: False while models of the configuration are still to come; until then no
        other model answers for them. `logged`: the models of which it was logged that they answer for others; changed
        here."""
        self.all = tuple(models)
        self.is_complete = is_complete
        self._by_alias = by_alias
        self._refuses_unknown = refuses_unknown
        self._limited: dict[tuple[str, ...], Models[M]] = {}
        self._logged = set() if logged is None else logged
        names = [(model.model_info.model, model) for model in models]
        seen = {defaults.alias: model for model in by_alias if (defaults := model.model_info.defaults) is not None}
        aliases = [(alias, seen.get(alias, model)) for model in models for alias in model.model_info.aliases]
        folders = [(model.model_info.folder_name, model) for model in models]
        self._exact = {**dict(aliases), **dict(names)}
        self._folder = _unique(folders)
        self._folded = _unique((name.casefold(), model) for name, model in (*names, *aliases, *folders))
        self._short = _unique((_without_organization(name.casefold()), model) for name, model in (*names, *aliases))

    def only(self, names: tuple[str, ...]) -> "Models[M]":
        """Those of the models that have these names in the configuration; there may be none. Call it on the event
        loop."""
        found = self._limited.get(names)
        if found is None:
            if len(self._limited) >= _MAX_LIMITED:
                self._limited.clear()
            found = self._limited[names] = Models(
                [model for model in self.all if model.model_info.model in names],
                refuses_unknown=self._refuses_unknown,
                by_alias=[model for model in self._by_alias if model.model_info.model in names],
                is_complete=self.is_complete,
                logged=self._logged,
            )
        return found

    @property
    def have_defaults(self) -> bool:
        """Some alias has request defaults."""
        return bool(self._by_alias)

    # --- names ----------------------------------------------------------------------------------------------

    def find(self, name: str) -> M | None:
        """The model that a name means; None for an unknown name."""
        if len(name) > _MAX_CHARS:
            return None
        found = self._find_whole(name)
        if found is None and ":" in name:
            base, _, suffix = name.rpartition(":")
            found = self._find_whole(base)
            if found is not None and self._refuses_unknown and not found.model_info.is_suffix(suffix):
                return None
        return found

    def _find_whole(self, name: str) -> M | None:
        found = self._exact.get(name) or self._folder.get(name)
        if found is not None or not name:
            return found
        folded = name.casefold()
        # Two names with different organizations are two models.
        short = _without_organization(folded)
        return self._folded.get(folded) or (self._folded.get(short) if short else self._short.get(folded))

    def as_named(self, model: M, name: str) -> M:
        """A model that `name` has found, or another generation of it, with the request defaults of the alias that it
        is."""
        found = self.find(name)
        return model if found is None or found.model_info.model != model.model_info.model else found

    def own_name(self, model: M, name: str) -> str:
        """`name` as the model's own `ModelInfo.prompt_of_model_name` understands it, whatever it means here: one of
        its names, and behind a colon what may choose a prompt."""
        info = model.model_info
        if name in info.names:
            return name
        if ":" in name and len(name) <= _MAX_CHARS and self._find_whole(name) is not model:
            base, _, suffix = name.rpartition(":")
            if info.is_suffix(suffix) or self._find_whole(base) is model:
                return f"{base if base in info.names else info.model}:{suffix}"
        return info.model if info.defaults is None else info.defaults.alias

    # --- the choice -----------------------------------------------------------------------------------------

    def choose(self, name: str | None, needs: Sequence[str], *, refuses_unknown: bool = False) -> M:
        """The model for a request that names one, or none: then, and for an unknown name if that is not refused, it is
        the first that has the first of the capabilities `needs`, or else of those that have the second, and so on. It
        is the first of all where none is needed, and where no model has one. `refuses_unknown`: whatever the policy is.

        Raises ModelNotFound, and Unavailable while models are still to come.
        """
        found = self.find(name) if name else None
        if found is not None:
            return found
        if not self.is_complete:
            raise _not_ready()
        if name and (refuses_unknown or self._refuses_unknown):
            known = [own for model in self.able(needs) or self.all for own in model.model_info.names]
            raise ModelNotFound(name, listed(known))
        able = (model for need in needs for model in self.able((need,)))
        default = next(able, self.all[0])
        if name:
            self._log_unknown(default.model_info.model)
        return default

    def refusal(self, name: str) -> ApiError:
        """The error for an unknown name that is always refused. It lists no model, because the client may have no
        key."""
        return unlisted(name) if self.is_complete else _not_ready()

    def able(self, needs: Sequence[str]) -> tuple[M, ...]:
        """The models that have one of the capabilities; all, if none is needed."""
        return tuple(
            model for model in self.all if not needs or any(need in model.model_info.capabilities for need in needs)
        )

    def _log_unknown(self, default: str) -> None:
        """Once for each model that answers in the place of another, whose name the log must not have: it is the
        client's."""
        if default not in self._logged:
            self._logged.add(default)
            log.info("requests name a model that is not configured; %s answers in its place", default)

    # --- paths ----------------------------------------------------------------------------------------------

    def split(self, path: str) -> tuple[str, str] | None:
        """The name and the rest of a path that begins with PREFIX; None if no model has such a name.

        A name may have slashes. One that is written as it is configured comes first, the longest of several; then the
        shortest that finds a model, because what follows is the path of a route.
        """
        readings = readings_of(path)
        exact = [reading for reading in readings if reading[0] in self._exact]
        found = (reading for reading in readings if self.find(reading[0]) is not None)
        return exact[-1] if exact else next(found, None)


def unlisted(name: str) -> ModelNotFound:
    """The error for a name that means no model, without a list of those that do."""
    return ModelNotFound(name, "those that GET /v1/models lists")


def _not_ready() -> Unavailable:
    return Unavailable("The server is starting; models are loading", retry_after_s=1, code="not_ready")


def readings_of(path: str) -> list[tuple[str, str]]:
    """What a path that begins with PREFIX may mean: a name, and the path behind it. The shortest name comes first."""
    parts = path.removeprefix(PREFIX).split("/")
    ends = range(1, min(len(parts), _MAX_PARTS) + 1)
    return [("/".join(parts[:end]), "/" + "/".join(parts[end:])) for end in ends]


def header_value(name: str) -> str:
    """The name of a model as the value of HEADER."""
    return name if name.isascii() and name.isprintable() else quote(name)


def _without_organization(name: str) -> str:
    """The second part of "org/name"; "" for another name."""
    organization, _, rest = name.partition("/")
    return rest if organization.strip(".") and "/" not in rest else ""


def _unique(named: Iterable[tuple[str, M]]) -> dict[str, M]:
    """By name, without the empty name and those of several models."""
    found: dict[str, M] = {}
    several: set[str] = set()
    for name, model in named:
        if found.setdefault(name, model) is not model:
            several.add(name)
    return {name: model for name, model in found.items() if name and name not in several}
