"""The served model as dialects see it: its names, its prompts, its limits.

Owns how the names of models and prompts in requests are understood, the same in every dialect. Immutable; a reload
makes another. Pure. Read by dialects, made by `vecd.gateway.service`.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from vecd.gateway.tokenization.vocabulary import NO_VOCABULARY, TokenVocabulary
from vecd.gateway.types.config import AliasDefaults, GatewayConfig
from vecd.gateway.types.errors import BadRequest, ModelNotFound
from vecd.gateway.types.quoting import quoted
from vecd.gateway.types.request import Overflow, Role
from vecd.shm.heads import ScoreHead, SparseHead, TokenHead
from vecd.shm.output import Output
from vecd.shm.residence import ModelState

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
"""The purposes of queries and of documents."""
PURPOSES = tuple(_PURPOSES)
"""The purposes that are known for every model."""

_MAX_LISTED_CHARS = 32
_MAX_LISTED = 20
_TAG = "latest"
"""Ollama's clients append it to every name."""
_VERSION = re.compile(r"(?:v|q|iq|f|fp|bf|int)?[0-9].*", re.IGNORECASE)
"""A version, a size or a type behind a colon, as in Ollama's tags ("v1.5", "335m-v1-fp16", "q8_0", "bf16"). It does not
match a misspelt name of a prompt ("query2")."""


def listed(names: Iterable[str]) -> str:
    """The names for an error message, cut because a model may have hundreds of prompts."""
    shown = [f"'{name[:_MAX_LISTED_CHARS]}'" for name in names]
    more = f" and {len(shown) - _MAX_LISTED} more" if len(shown) > _MAX_LISTED else ""
    return ", ".join(shown[:_MAX_LISTED]) + more


@dataclass(frozen=True, slots=True)
class ModelInfo:
    model: str
    """Reported in every response."""
    aliases: tuple[str, ...]
    is_strict: bool
    dim: int
    hidden_size: int
    max_tokens: int
    is_normalized: bool
    """The model's own vectors have length 1."""
    is_matryoshka: bool
    matryoshka_dims: tuple[int, ...]
    pools_prompt: bool
    model_type: str
    pooling: tuple[str, ...]
    max_inputs: int
    max_request_tokens: int | None
    max_body_bytes: int
    overflow: Overflow
    compute_type: str
    """"cpu" or "gpu"."""
    version: str
    created_at: int
    """Seconds since 1970."""
    default_prompt: str = ""
    has_chat_template: bool = False
    has_quantization_ranges: bool = False
    """int8 and uint8 are quantized with ranges of the model's own vectors."""
    least_tokens: int = 1
    """The smallest limit on an input's tokens: its special tokens, and one of the text."""
    weights_bytes: int = 0
    """The size of the files of the weights."""
    prompts: dict[str, str] = field(default_factory=dict)
    """By the names in the model's files."""
    capabilities: tuple[str, ...] = ("dense",)
    """As in `vecd.shm.card.ModelCard`, like all that follows."""
    outputs: frozenset[Output] = frozenset({Output.VECTORS, Output.UNNORMALIZED, Output.TOKENS})
    num_labels: int = 0
    token_dim: int = 0
    truncate_dim: int = 0
    vocab_size: int = 0
    row_dim: int = 0
    score: ScoreHead | None = None
    sparse: SparseHead | None = None
    tokens: TokenHead | None = None
    pools_states: bool = True
    vocabulary: TokenVocabulary = NO_VOCABULARY
    folder_name: str = ""
    """The last part of the folder's path."""
    allows_keep_alive: bool = False
    """Clients may set the time that the model stays loaded."""
    state: str = ModelState.READY.value
    """A `vecd.shm.residence.ModelState`. This and what follows are as they were when the model was described, by
    `vecd.gateway.api.context.Context.describe_model`."""
    is_resident: bool = True
    """It has weights in memory that requests can be served from."""
    expires_at: float | None = None
    """When it is unloaded if no request comes, in seconds since 1970; None: it stays."""
    identity: str | None = None
    """As in `vecd.gateway.types.identity.Identity`."""
    identity_by_alias: Mapping[str, str | None] = field(default_factory=dict)
    """Of the aliases that have one of their own."""
    alias_defaults: tuple[AliasDefaults, ...] = ()
    """Of the aliases that have request defaults."""
    defaults: AliasDefaults | None = None
    """Those of the alias by which the model is seen; None for every other name. See `by_alias`."""
    model_prompt: str | None = None
    """The model's own default prompt, where `default_prompt` is that of an alias; None: it is the model's."""

    @classmethod
    def of(
        cls, config: GatewayConfig, created_at: int, least_tokens: int, vocabulary: TokenVocabulary = NO_VOCABULARY
    ) -> "ModelInfo":
        card = config.card
        return cls(
            model=config.model,
            aliases=config.aliases,
            is_strict=config.is_strict or config.unknown_model == "refuse",
            dim=card.dim,
            hidden_size=card.hidden_size,
            max_tokens=config.max_tokens,
            is_normalized=card.is_normalized,
            is_matryoshka=config.is_matryoshka,
            matryoshka_dims=card.matryoshka_dims,
            truncate_dim=card.truncate_dim,
            pools_prompt=card.pools_prompt,
            model_type=card.model_type,
            pooling=card.pooling,
            max_inputs=config.max_inputs,
            max_request_tokens=config.max_request_tokens,
            max_body_bytes=config.max_body_bytes,
            overflow=Overflow(config.overflow),
            compute_type=config.compute_type,
            version=config.version,
            created_at=created_at,
            default_prompt=card.prompt,
            has_chat_template=config.chat_template is not None,
            has_quantization_ranges=config.quantization_ranges is not None,
            least_tokens=least_tokens,
            weights_bytes=card.weights_bytes,
            prompts=dict(card.prompts),
            capabilities=card.capabilities,
            outputs=card.outputs,
            num_labels=card.num_labels,
            token_dim=card.token_dim,
            vocab_size=card.vocab_size,
            row_dim=card.row_dim,
            score=card.score,
            sparse=card.sparse,
            tokens=card.tokens,
            pools_states=card.pools_states,
            vocabulary=vocabulary,
            folder_name=PurePath(card.folder).name,
            allows_keep_alive=config.allows_keep_alive,
            alias_defaults=config.alias_defaults,
        )

    def by_alias(self, defaults: AliasDefaults) -> "ModelInfo":
        """The model as it is seen by an alias with request defaults: what they say is its own default there."""
        prompt, overflow = self._prompt_by(defaults), defaults.overflow
        return replace(
            self,
            defaults=defaults,
            default_prompt=self.default_prompt if prompt is None else prompt,
            model_prompt=None if prompt is None else self.default_prompt,
            overflow=self.overflow if overflow is None else Overflow(overflow),
        )

    def _prompt_by(self, defaults: AliasDefaults) -> str | None:
        """The default prompt by an alias; None: the model's. A multi-vector model has templates for both roles, which
        have their prompts."""
        if defaults.prompt is not None:
            return defaults.prompt
        if defaults.prompt_name is not None:
            return self.prompt_named(defaults.prompt_name, "prompt_name")
        return None if defaults.role is None or self.tokens is not None else self.prompt_for(defaults.role)

    def by_name(self, name: str) -> "ModelInfo":
        """The model as it is seen by one of its names."""
        found = (each for each in self.alias_defaults if each.alias == name)
        return next((self.by_alias(defaults) for defaults in found), self)

    @property
    def num_dimensions(self) -> int:
        """Of a dense vector in the response to a request that does not say."""
        by_alias = None if self.defaults is None else self.defaults.dimensions
        return by_alias or self.truncate_dim or self.dim

    @property
    def is_dense(self) -> bool:
        """A text has a vector."""
        return self.capabilities[0] == "dense"  # which is the first, if it is one of them

    def role_of(self, purpose: str | None) -> Role | None:
        """What texts of a purpose are; None for other purposes than retrieval."""
        if purpose in (*_QUERY, "code.query"):
            return Role.QUERY
        return Role.DOCUMENT if purpose in _RETRIEVAL else None

    def what_it_is(self) -> str:
        """The kind of the model, for an error message."""
        return f"This server's model is for: {', '.join(self.capabilities)}"

    @property
    def names(self) -> tuple[str, ...]:
        """The model's own name, and its aliases."""
        return (self.model, *self.aliases)

    def _is_own(self, name: str) -> bool:
        return name == self.model or name in self.aliases

    def is_suffix(self, suffix: str) -> bool:
        """Whether this may stand behind a name of the model: Ollama's tag, or what chooses a prompt."""
        return suffix == _TAG or suffix in self.prompts or suffix in _PURPOSES

    def prompt_of_model_name(self, name: str | None) -> str | None:
        """The prompt that a model's name selects behind its last colon, as in "minilm:query". None if it selects none,
        as most names with colons: "nomic-embed-text:v1.5", "org/model:latest".

        Raises ModelNotFound for another model's name if names are strict, and BadRequest for a misspelt prompt: this
        model's name with something behind the colon that is neither a version nor one of its prompts.
        """
        if name is None or (":" not in name and not self.is_strict) or self._is_own(name):
            return None
        base, colon, suffix = name.rpartition(":")
        if colon and (not self.is_strict or self._is_own(base)) and self.is_suffix(suffix):
            return None if suffix == _TAG else self.prompt_for(suffix, "model")
        if self.is_strict:
            raise ModelNotFound(name, listed(self.names))
        if colon and self.prompts and self._is_own(base) and not _VERSION.fullmatch(suffix):
            raise self._unknown_prompt(suffix, "model")
        return None

    def prompt_named(self, name: str, param: str) -> str:
        """The model's prompt of exactly that name. Raises BadRequest, which names the field `param`."""
        if name not in self.prompts:
            raise self._unknown_prompt(name, param)
        return self.checked(self.prompts[name], param)

    def _unknown_prompt(self, name: str, param: str) -> BadRequest:
        known = listed(self.prompts) or "none"
        return BadRequest(f"'{param}': the model has no prompt {quoted(name)}; it has {known}", param=param)

    def prompt_for(self, purpose: str, param: str = "input_type") -> str | None:
        """The model's prompt for texts of a purpose: the prompt of that name, or of a name that means the same.

        If the model has no such prompt: None, which means the default prompt. For queries and documents it is ""
        instead if there is a default prompt, because that may be meant for the other of the two; sentence-transformers'
        `encode_query` and `encode_document` do the same. By an alias with a prompt: the text of the model's own default
        prompt in place of None. Raises BadRequest, which names the field `param`, for an
        unknown purpose.
        """
        for name in (purpose, *_PURPOSES.get(purpose, ())):
            if name in self.prompts:
                return self.checked(self.prompts[name], param)
        if purpose not in _PURPOSES:
            known = listed((*self.prompts, *(purpose for purpose in PURPOSES if purpose not in self.prompts)))
            raise BadRequest(f"'{param}' must be one of {known}, is {quoted(purpose)}", param=param)
        if self.model_prompt is not None:  # None would mean that of the alias, and the request names another purpose
            return "" if purpose in _RETRIEVAL else self.model_prompt
        return "" if self.default_prompt and purpose in _RETRIEVAL else None

    def checked(self, prompt: str, param: str) -> str:
        """`prompt`. Raises BadRequest if it is not empty and this model takes none."""
        if prompt and not self.pools_prompt:
            raise BadRequest(
                f"'{param}': this model leaves prompts out of its pooling (include_prompt), which is not supported",
                param=param,
            )
        return prompt

    def check_max_tokens(self, max_tokens: int, param: str) -> int:
        """`max_tokens`, a request's limit on the tokens of an input. Raises BadRequest, which names the field `param`,
        if it leaves no room for a text."""
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
        if dimensions == self.dim:
            return dimensions if self.truncate_dim else None
        if not self.is_matryoshka:
            hint = " (--matryoshka allows fewer)" if 1 <= dimensions < self.dim else ""
            raise BadRequest(
                f"This model does not support specifying dimensions. Its vectors have {self.dim}, '{param}' is "
                f"{dimensions}: leave it out, or set {self.dim}{hint}",
                param=param,
            )
        if self.matryoshka_dims and dimensions not in self.matryoshka_dims:
            known = ", ".join(map(str, sorted({*self.matryoshka_dims, self.dim})))
            raise BadRequest(
                f"'{param}' must be one of {known}, is {dimensions} (--matryoshka allows any)", param=param
            )
        if not 1 <= dimensions <= self.dim:
            raise BadRequest(f"'{param}' must be 1 to {self.dim}, is {dimensions}", param=param)
        return dimensions
