"""What a model has behind its transformer besides a dense vector, as data: scores, sparse and token vectors.

Owns the types, which are a part of the model card (`vecd.model.card`).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vecd.model.files import ADAPTER, Folder, ModelError, ModelSettings, has_safetensors, single_file

CAPABILITIES = ("dense", "rerank", "classify", "token-classify", "sparse", "multi-vector")
"""A model with one label, or with a query and a document in one sequence, can rerank; every model for sequence
classification can classify."""

SCORE_ACTIVATIONS = ("identity", "sigmoid", "softmax", "tanh")
"""Functions from logits to scores. The gateway applies them, in float32."""


@dataclass(frozen=True, slots=True)
class Step:
    """One layer of a head, applied to rows [N, D]: pooled vectors, or the states of tokens."""

    kind: str
    """"dense", "normalize", "layer_norm", "tanh_127": 127 · tanh of each element, which the gateway rounds; or "logit":
    the product with row `rows[0]` of a matrix, less that with row `rows[1]` if there are two."""
    path: str = ""
    """Folder of the module's weights; empty for "normalize", and where `tensor` is given."""
    in_dim: int = 0
    out_dim: int = 0
    bias: bool = True
    activation: str = "identity"
    """Of "dense": a key of `vecd.workers.activations.ACTIVATIONS`."""
    tensor: str = ""
    """The weights are the model's own, under this name with ".weight" and ".bias" behind it."""
    bias_tensor: str = ""
    """The whole name of the bias, where it has another one."""
    epsilon: float = 1e-5
    """Of "layer_norm"."""
    rows: tuple[int, ...] = ()
    """Of "logit"."""
    file: str = ""
    """In place of `path`: a file relative to the model's folder, of tensors "weight" and "bias". Safetensors, or a
    state dict that torch has saved."""
    has_residual: bool = False
    """Of "dense": the input is added to the output, through a matrix of its own where they differ in width."""
    divisor: float = 1.0
    """Of "dense": of what comes out behind the activation."""
    cap: float = 0.0
    """Of "logit": a product p becomes cap · tanh(p / cap) before the difference is taken; 0: it stays as it is."""
    scale: float = 1.0
    """Of "logit": what the difference is multiplied by."""


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """How a model without a template for pairs in its tokenizer gets a query and a document, as one text: `before`, the
    query, `between`, the document and `after`. "{instruction}" in these three stands for the instruction, and
    "{ instruction}" for a blank and the instruction, or for nothing where it is empty. What is too long is cut at the
    end of the document."""

    before: str
    between: str
    after: str
    instruction: str = ""
    is_document_first: bool = False
    """The query and the document have changed places."""

    @property
    def has_instruction(self) -> bool:
        return _INSTRUCTION.search(self.before + self.between + self.after) is not None


_INSTRUCTION = re.compile(r"\{( ?)instruction\}")
_PLACES = re.compile(r"\{([^{}]*)\}")


def with_instruction(part: str, instruction: str) -> str:
    """A part of a `PairTemplate`, with an instruction in its place."""
    return _INSTRUCTION.sub(lambda found: instruction and found[1] + instruction, part)


def read_pair_template(text: str, instruction: str = "") -> PairTemplate:
    """Of a text with {query} and {document}, and perhaps {instruction}. Raises ValueError, with a reason that goes on
    from the setting's name."""
    names = _PLACES.findall(text)
    for name in names:
        if name not in ("query", "document", "instruction", " instruction"):
            raise ValueError(f"has {{{name:.40}}}; known are {{query}}, {{document}} and {{instruction}}")
    for name in ("query", "document"):
        if names.count(name) != 1:
            raise ValueError(f"must have {{{name}}} once, and has it {names.count(name)} times")
    before, between, after = re.split(r"\{(?:query|document)\}", text)
    is_document_first = names.index("document") < names.index("query")
    return PairTemplate(before, between, after, instruction, is_document_first)


@dataclass(frozen=True, slots=True)
class TextTemplate:
    """How a model whose texts go through its chat template gets one."""

    variants: tuple[tuple[str, str], ...]
    """What is before and behind a text, and the same of a text with a prompt, for which "{instruction}" stands; one
    alone: there is no place for a prompt."""
    strips: bool = False
    strips_prompt: bool = False
    adds_special_tokens: bool = False


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """Logits of a sequence, of a pair, or of each token: the card's `num_labels` are their number."""

    labels: tuple[str, ...]
    """The names, by index; "LABEL_0", … where the model has none."""
    activation: str
    """One of SCORE_ACTIVATIONS: the model's own, from logits to scores."""
    pooling: str = ""
    """A key of POOLINGS; empty: for each token."""
    steps: tuple[Step, ...] = ()
    """Empty where no table describes the family: then only the class in transformers computes it."""
    architecture: str = ""
    """The name of the class in transformers; empty where it is not known."""
    pair_template: PairTemplate | None = None
    """None: the tokenizer's own."""
    has_segments: bool = True
    """False: the tokenizer's settings leave token types out, so that all tokens have type 0."""
    padding_id: int | None = None
    """Of pooling "lasttoken": the last token with another id is pooled, as in transformers; None: the last one."""

    @property
    def has_class(self) -> bool:
        """Whether transformers has a class for all of it, which is then the reference; else the padded path is."""
        return bool(self.architecture) or [step.kind for step in self.steps] == ["logit"]

    @property
    def logits(self) -> list[tuple[int | None, int | None, float]]:
        """Of the steps that are logits of tokens: the token, the one whose logit is taken from it, and the scale."""
        pairs = ((step, (*step.rows, None)) for step in self.steps if step.kind == "logit")
        return [(rows[0], rows[1], step.scale) for step, rows in pairs]


@dataclass(frozen=True, slots=True)
class SparseHead:
    """A weight for each token of the vocabulary (Output.SPARSE), or for each token of the sequence (LEXICAL)."""

    steps: tuple[Step, ...]
    is_lexical: bool = False
    """One number, at least 0, for each token; of equal tokens the largest counts. `ignored_ids` have none."""
    pooling: str = "max"
    num_logs: int = 1
    """How often log1p is applied behind relu."""
    ignored_ids: tuple[int, ...] = ()
    query_weights: str = ""
    """File, relative to the model's folder, with a weight for each token of the vocabulary: safetensors by id, or JSON
    by token. A query's sparse vector has those of its different tokens. Empty: there is no difference."""


@dataclass(frozen=True, slots=True)
class TokenHead:
    """A vector for each token (Output.TOKEN_VECTORS); the card's `token_dim` is its length."""

    steps: tuple[Step, ...]
    query_marker: int | None = None
    """Put behind the first special token of a query; None: nothing is."""
    document_marker: int | None = None
    query_prompt: str = ""
    document_prompt: str = ""
    query_tokens: int = 0
    """A query is filled up to this many tokens with `expansion_id`, and cut there; 0: as long as it is."""
    max_query_tokens: int | None = None
    """Where a query is cut, if not at `query_tokens`; 0: at the model's limit."""
    expansion_id: int | None = None
    """None: a query is not filled up."""
    attends_to_expansion: bool = False
    document_tokens: int = 0
    """A document is cut to this many tokens; 0: to the model's limit."""
    ignored_ids: tuple[int, ...] = ()
    """Tokens of a document that get no vector."""
    drops_first: bool = False
    """The first token of a sequence gets no vector."""
    is_mean: bool = False
    """The score of a document is the mean of the query's maxima, not their sum."""

    @property
    def has_unattended(self) -> bool:
        return self.expansion_id is not None and not self.attends_to_expansion


class UnknownActivation(ModelError):
    pass


@dataclass(frozen=True, slots=True)
class HeadLayers:
    """The layers of a family's own head, by the names of their tensors without ".weight" and ".bias"."""

    last: str = "classifier"
    dense: str = ""
    """The layer before it; empty for none."""
    activation: str = "tanh"
    """What follows `dense`. Like `epsilon`, the value itself, or a setting in config.json and its default."""
    norm: str = ""
    """Behind `dense`; empty for none."""
    epsilon: str = "layer_norm_eps:1e-12"

    def steps_before_last(
        self, config: ModelSettings, in_dim: int, width: int, has_bias: Callable[[str], bool]
    ) -> tuple[Step, ...]:
        """Raises UnknownActivation."""
        if not self.dense:
            return ()
        setting, _, default = self.activation.partition(":")
        stated = str(config.get(setting, default)) if default else setting
        activation = "silu" if stated == "swish" else stated
        if activation not in ("gelu", "relu", "silu", "tanh"):
            raise UnknownActivation(f"{config.path}: activation {stated} in the head for masked words is not supported")
        bias = has_bias(self.dense)
        dense = Step("dense", tensor=self.dense, in_dim=in_dim, out_dim=width, bias=bias, activation=activation)
        if not self.norm:
            return (dense,)
        setting, _, default = self.epsilon.partition(":")
        epsilon = config.number(setting, float(default)) if default else float(setting)
        bias = has_bias(self.norm)
        norm = Step("layer_norm", tensor=self.norm, in_dim=width, out_dim=width, bias=bias, epsilon=epsilon)
        return dense, norm


MODERNBERT = HeadLayers(
    dense="head.dense", activation="classifier_activation:gelu", norm="head.norm", epsilon="norm_eps:1e-5"
)
"""For every task; of masked words with another last layer."""

# The modules of a model in sentence-transformers' layouts: their list, and what Pooling and the steps behind it do.


def _mean_weighted_by_position(arrays: Any, hidden: Any) -> Any:
    weights = arrays.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype, device=hidden.device)
    return arrays.einsum("blh,l->bh", hidden, weights) / weights.sum()


POOLINGS: Mapping[str, Callable[[Any, Any], Any]] = {
    "cls": lambda arrays, hidden: hidden[:, 0],
    "max": lambda arrays, hidden: arrays.amax(hidden, 1),
    "mean": lambda arrays, hidden: hidden.sum(1) / hidden.shape[1],
    "mean_sqrt_len_tokens": lambda arrays, hidden: hidden.sum(1) / hidden.shape[1] ** 0.5,
    "weightedmean": _mean_weighted_by_position,
    "lasttoken": lambda arrays, hidden: hidden[:, -1],
}
"""From numpy or torch, and float32 hidden states of equally long sequences, [B, L, H], to [B, H]; in the order in which
sentence-transformers concatenates them if a model has several."""

_LEGACY_NAMES = ("cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
"""Of the first of them, behind "pooling_mode_"."""

_PYLATE_DENSE = "pylate.models.Dense.Dense"
_QUANTIZER = "st_quantize.FlexibleQuantizer"
"""Of pplx-embed: code in the model's repository, of which nothing is read: round(127 · tanh(x)) unless it is called for
signs."""


@dataclass(frozen=True, slots=True)
class Module:
    type: str
    path: str

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]

    @property
    def leads_out(self) -> bool:
        return Path(self.path).is_absolute() or ".." in Path(self.path).parts


def read_modules(folder: Folder) -> list[Module]:
    """Those of modules.json; none where it is missing. Raises ModelError when it is something else."""
    path = folder.path / "modules.json"
    if not path.exists():
        return []
    entries = folder.json(path.name)
    if not isinstance(entries, list) or not entries:
        raise ModelError(f"{path}: must be a list of modules")
    for entry in entries:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in ("type", "path")):
            raise ModelError(f"{path}: each module must have a type and a path")
    return [Module(entry["type"], entry["path"]) for entry in entries]


def folders_without_safetensors(folder: Path) -> list[Path]:
    """Of the model in `folder` and its modules, those that may have weights, and have neither these nor an adapter as
    safetensors."""
    modules = read_modules(Folder(folder)) or [Module("Transformer", "")]
    paths = {module.path for module in modules if module.kind not in _WITHOUT_WEIGHTS and not module.leads_out}
    parts = [folder / each for each in sorted(paths)]
    return [part for part in parts if not (has_safetensors(part) or (part / ADAPTER).is_file())]


_WITHOUT_WEIGHTS = (
    "Pooling",
    "Normalize",
    "MultiVectorMask",
    "SpladePooling",
    "LogitScore",
    "Router",
    "FlexibleQuantizer",
)


def check_modules(path: Path, modules: Sequence[Module]) -> None:
    """Raises ModelError for a module that is code of the model's repository, or that leads out of the model's
    folder."""
    for module in modules:
        if module.kind == "CLIPModel":
            raise ModelError(f"{path}: module CLIPModel has images; vecd serves text")
        is_own = module.type.partition(".")[0] == "sentence_transformers"
        if not is_own and module.type not in (_PYLATE_DENSE, _QUANTIZER):
            raise ModelError(f"{path}: module {module.type} is not sentence-transformers' own, which vecd refuses")
        if module.leads_out:
            raise ModelError(f"{path}: module path {module.path!r} leads out of the model's folder")


def read_pooling(config: ModelSettings, default_prompt: str) -> tuple[tuple[str, ...], bool]:
    """The modes of a Pooling module, and whether it pools the tokens of a prompt."""
    stated = config.get("pooling_mode")
    if stated is None:
        legacy = zip(_LEGACY_NAMES, POOLINGS, strict=False)
        modes = [mode for name, mode in legacy if config.get(f"pooling_mode_{name}")] or ["mean"]
    else:
        modes = stated if isinstance(stated, list) and stated else [stated]
    for mode in modes:
        if mode not in tuple(POOLINGS):  # it may be anything
            raise config.error(f"pooling_mode {mode!r} is unknown; known: {', '.join(POOLINGS)}")
    pools_prompt = config.get("include_prompt") is not False
    if not pools_prompt and default_prompt:
        raise config.error("include_prompt=false together with a default prompt is not supported")
    return tuple(modes), pools_prompt


def read_steps(
    folder: Folder, modules: Sequence[Module], dim: int, *, of_tokens: bool = False
) -> tuple[tuple[Step, ...], int]:
    """The steps of a head, and the number of floats behind them."""
    steps: list[Step] = []
    for module in modules:
        step = _read_step(folder, module, dim, of_tokens=of_tokens)
        if step is not None:
            steps.append(step)
            dim = step.out_dim or dim
    return tuple(steps), dim


def _read_step(folder: Folder, module: Module, in_dim: int, *, of_tokens: bool) -> Step | None:
    match module.kind:
        case "Dropout":
            return None
        case "Normalize":
            # Without a statement it normalizes pooled vectors, which a multi-vector model has none of.
            config = folder.optional(module.path, "config.json")
            config.setdefault("module_input_name", "sentence_embedding")
            _check_input_and_output(config, of_tokens=of_tokens)
            return Step("normalize")
        case "LayerNorm" if not of_tokens:
            single_file(folder.path / module.path)
            return Step("layer_norm", path=module.path, in_dim=in_dim, out_dim=in_dim)
        case "Dense":
            return _read_dense(folder.settings(module.path, "config.json"), module.path, in_dim, of_tokens=of_tokens)
        case "FlexibleQuantizer" if module.type == _QUANTIZER and not of_tokens:
            return Step("tanh_127")
        case unknown:
            raise ModelError(f"{folder.path / 'modules.json'}: module {unknown} is not supported")


def _read_dense(config: ModelSettings, module_path: str, in_dim: int, *, of_tokens: bool) -> Step:
    _check_input_and_output(config, of_tokens=of_tokens)
    if config.get("in_features") != in_dim:
        raise config.error(f"in_features is {config.get('in_features')}, but the vector has {in_dim}")
    has_residual = bool(config.get("use_residual"))
    if has_residual and not of_tokens:
        raise config.error("use_residual is not supported")
    activation = config.get("activation_function", "torch.nn.Tanh")
    # sentence-transformers accepts no other either, but uses Tanh instead.
    if not isinstance(activation, str) or not activation.startswith("torch.nn."):
        raise config.error(f"activation_function {activation!r} is not one of torch.nn's")
    single_file(config.path.parent)
    return Step(
        "dense",
        path=module_path,
        in_dim=in_dim,
        out_dim=config.positive("out_features"),
        bias=bool(config.get("bias", True)),
        activation=activation.rpartition(".")[2].lower(),
        has_residual=has_residual,
    )


def _check_input_and_output(config: ModelSettings, *, of_tokens: bool) -> None:
    expected, where = ("token_embeddings", "tokens") if of_tokens else ("sentence_embedding", "the pooled vector")
    for name in ("module_input_name", "module_output_name"):
        value = config.get(name)
        if value not in (None, expected):
            raise config.error(f"{name} {value!r} is not supported: steps work on {where}")
