"""The folder of a model as its readers see it: what is read alike of several kinds, each thing when it is asked for.

Owns the reading of config.json, of the files of sentence-transformers beside it, and the limits that they set. Reads
JSON and no weights, and knows no kind of head.

Sources of the formats: the files as saved by sentence-transformers 2 to 6.
"""

import re
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import NoneType

from vecd.base.files import JsonMapping, JsonObject
from vecd.model.architecture import native_config
from vecd.model.files import (
    Folder,
    ModelError,
    ModelSettings,
    export_files,
    has_safetensors,
    vocabulary_files,
    weight_files,
    weights_in,
)
from vecd.model.steps import Module, check_modules, read_modules

# Families whose position ids start after the padding id, so that there are two more positions than tokens.
# Source: create_position_ids_from_input_ids in transformers' modeling_roberta.
POSITIONS_AFTER_PADDING = frozenset(
    {
        "roberta",
        "xlm-roberta",
        "xlm_roberta_flash",
        "camembert",
        "xlm-roberta-xl",
        "mpnet",
        "longformer",
        "data2vec-text",
        "roberta-prelayernorm",
        "xmod",
        "esm",
        "ibert",
        "lilt",
        "luke",
    }
)

_OF_IMAGES = ("clip", "siglip", "siglip2", "chinese_clip", "jina_clip", "colpali", "colqwen2", "colmodernvbert")

_OTHER_RANKINGS = {
    "JinaForRanking": "listwise: the score of a document depends on the others of its request",
    "LayerWiseMiniCPMForCausalLM": "layerwise: its score comes from a layer in the middle, by code of its own",
    "CostWiseGemmaForCausalLM": "lightweight: it drops layers and tokens on the way, by code of its own",
}
"""Rerankers whose scores are not those of one pair in one pass, by their class."""

# sentence_bert_config.json and so on: where sentence-transformers looks, in this order. Since version 2 it writes the
# first.
_SENTENCE_BERT_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")

_ROLES = ("document", "query")

_WITHOUT_EFFECT = ("padding", "padding_side", "pad_to_multiple_of", "return_tensors", "logits_to_keep")
"""Arguments for the tokenizer that change no token of a text."""

_TASKS = {
    "feature-extraction": ("last_hidden_state", "an embedding"),
    "fill-mask": ("logits", "a sparse"),
    "text-generation": ("logits", "a causal reranking"),
    "sequence-classification": ("logits", "a classifying"),
}
"""The output of a task, and whose it is."""


class ModelFolder(Folder):
    """What it has raises ModelError for a model that cannot be served."""

    def __init__(
        self,
        path: Path,
        kind: str = "auto",
        pooling: str = "auto",
        file: str = "",
        *,
        yes: str = "",
        no: str = "",
        template: str = "",
        task: str = "",
    ) -> None:
        """`kind` and `pooling`: as `vecd.model.card.read_card` gets them. `file`: of the weights, as --file names it;
        an export is taken also where there are safetensors. `yes`, `no` and `template`: of the model's table in the
        configuration; empty for none. `task`: what the texts are for, where that chooses the route of a Router."""
        super().__init__(path.resolve())
        self.kind, self.pooling, self.file = kind, pooling, file
        self.yes, self.no, self.template, self.task = yes, no, template, task

    @cached_property
    def stated(self) -> ModelSettings:
        """What sentence-transformers says of the model."""
        return self.optional("config_sentence_transformers.json")

    @cached_property
    def listed(self) -> list[Module]:
        """The modules as modules.json has them; none where there is no such file."""
        modules = read_modules(self)
        check_modules(self.path / "modules.json", modules)
        return modules

    @cached_property
    def modules(self) -> list[Module]:
        """The modules that a text goes through: of a Router those of one route, and those behind it."""
        if not self.routes:
            return self.listed
        chain = [*self.routes[self.route], *self.listed[1:]]
        check_modules(self.router.path, chain)
        return chain

    @property
    def kinds(self) -> list[str]:
        """Of the modules."""
        return [module.kind for module in self.modules]

    @property
    def is_cross_encoder(self) -> bool:
        return bool(self.stated.get("model_type") == "CrossEncoder")

    @property
    def is_plain(self) -> bool:
        """Whether there is a transformer alone, with the head of its class in transformers."""
        return not self.modules or (self.is_cross_encoder and self.kinds == ["Transformer"])

    def modules_behind(self, *first: str) -> list[Module]:
        """The other modules than `first`, with which they must begin; none of a plain transformer."""
        if self.is_plain:
            return []
        path, kinds = self.path / "modules.json", self.kinds
        if kinds[: len(first)] != list(first):
            raise ModelError(f"{path}: must begin with {' and '.join(first)}, begins with {kinds[:2]}")
        for kind in first:
            if kinds.count(kind) != 1:
                raise ModelError(f"{path}: must have one {kind} module, has {kinds.count(kind)}")
        return self.modules[len(first) :]

    # --- a Router: other modules for queries than for documents ------------------------------------------------
    #
    # Source: `Router` of sentence-transformers 6.2. The only modality is text.

    @cached_property
    def router(self) -> ModelSettings:
        return self.settings(self.listed[0].path, "router_config.json")

    @cached_property
    def routes(self) -> dict[str, list[Module]]:
        """The modules of each; none if the first module is no Router."""
        first = next(iter(read_modules(self)), None)  # unchecked, since an adapter that is to be merged names code
        if first is None or first.kind != "Router":
            return {}
        try:
            place, types, structure = Path(self.listed[0].path), self.router["types"], self.router["structure"]
            routes = {
                name: [Module(str(types[each]), str(place / each)) for each in modules]
                for name, modules in structure.items()
            }
        except (TypeError, LookupError, AttributeError) as error:
            raise self.router.error(f"cannot be read: {error!r}") from None
        if not routes or not all(routes.values()):
            raise self.router.error("structure must have modules for each route")
        return routes

    @cached_property
    def route(self) -> str:
        """The one of `task`, or of texts that are for nothing. Raises ModelError if there is none."""
        parameters = self.router.inner("parameters")
        if found := self._route_of(self.task):
            return found
        default = parameters.get("default_route")
        if default is None and parameters.get("allow_empty_key", True):
            default = next(iter(self.routes))
        if self.task or default not in self.routes:
            what = f"for {self.task!r}" if self.task else "where the model's name has none behind it, as in NAME/query"
            raise self.router.error(f"there is no route {what}; there are {', '.join(self.routes)}")
        return str(default)

    def _route_of(self, task: str) -> str:
        mappings = self.router.inner("parameters").inner("route_mappings")
        keys = ((task or None, "text"), (task or None, None), (None, "text"), (None, None))
        found = [mappings[str(key)] for key in keys if str(key) in mappings]
        return next((str(name) for name in (*found, task, "text") if name in self.routes), "")

    @cached_property
    def roles(self) -> dict[str, bool]:
        """Of queries and documents, those that a Router has other modules for than for the rest: whether `route` is
        theirs. Empty where there is no Router, or one chain of modules for both."""
        chains = {role: self.routes[name] for role in _ROLES if self.routes and (name := self._route_of(role))}
        of_each = {role: chain == self.routes[self.route] for role, chain in chains.items()}
        return {} if self.task not in _ROLES and all(of_each.values()) else of_each

    @property
    def role(self) -> str | None:
        """Of the texts that this model is for: "query", "document", or "" for others. None: it is for all."""
        if not self.roles:
            return None
        return self.task if self.task in _ROLES else next((role for role, is_own in self.roles.items() if is_own), "")

    # --- the transformer --------------------------------------------------------------------------------------

    @cached_property
    def place(self) -> str:
        """The folder of weights and tokenizer, relative to the model's. A reader may set another."""
        return self.modules[0].path if self.modules else ""

    @property
    def weights_folder(self) -> Path:
        return self.path / self.place

    @property
    def tokenizer(self) -> Path:
        return self.weights_folder / "tokenizer.json"

    @cached_property
    def export(self) -> Path | None:
        """The ONNX export that is named; or the first of `exports`, where there are no safetensors."""
        if self.file.endswith(".onnx"):
            return self.path / self.file
        return next(iter(self.exports), None) if not has_safetensors(self.weights_folder) else None

    @cached_property
    def exports(self) -> list[Path]:
        """The first choice first."""
        return weights_in(self.weights_folder, ".onnx")

    @cached_property
    def weights(self) -> list[Path]:
        return export_files(self.export) if self.export else weight_files(self.weights_folder)

    @cached_property
    def config(self) -> ModelSettings:
        """The transformer's, as transformers' own classes have it, with `hidden_size` and `vocab_size`. The files of
        the transformer are there."""
        config = _read_config(self.settings(self.place, "config.json"))
        if not self.tokenizer.is_file() and not vocabulary_files(self.weights_folder):
            raise ModelError(f"{self.tokenizer}: file missing, and nothing there to make it from")
        _ = self.weights  # raises for a file that is missing
        config["hidden_size"] = config.positive("hidden_size", "dim", "d_model", "n_embd")
        config["vocab_size"] = config.positive("vocab_size")
        return config

    @cached_property
    def front(self) -> str:
        """What README.md says about the model before its text, as YAML; empty for none."""
        with suppress(OSError):
            return (self.path / "README.md").read_text(encoding="utf-8", errors="replace").partition("\n---")[0]
        return ""

    def stated_in_front(self, names: str) -> str:
        """The lines of the front that begin with one of `names`, a regular expression, and of the lists under them."""
        return " ".join(re.findall(rf"^(?:{names}):.*(?:\n[ \t]*-.*)*", self.front, re.MULTILINE))

    @property
    def names(self) -> str:
        """Its own, and those of the models that it was made from."""
        return f"{names_of(self.path, self.config)} {self.stated_in_front('base_model')}"

    def sentence_bert(
        self, wanted: str = "feature-extraction", default: str = "", *, may_expand: bool = False
    ) -> JsonMapping:
        """The settings of a Transformer module; may be empty. Refuses those that would change vectors. `wanted` is the
        task that the model has to have, `default` the one where the file names none, if it is another. `may_expand`:
        of a multi-vector model."""
        names = (f"sentence_{kind}_config.json" for kind in _SENTENCE_BERT_KINDS)
        name = next((name for name in names if (self.weights_folder / name).exists()), None)
        if name is None:
            return {}
        config = self.settings(self.place, name)
        task = config.get("transformer_task", default or wanted)
        if task != wanted:
            raise config.error(f"transformer_task {task!r} is not {_TASKS[wanted][1]} model's")
        plain = {"method": "forward", "method_output_name": _TASKS[task][0]}
        modalities = config.get("modality_config", {"text": plain})
        # As messages, if it has them.
        setting = modalities.get("message", modalities.get("text")) if isinstance(modalities, dict) else None
        if not isinstance(setting, dict) or {**setting, "format": ""} != {**plain, "format": ""}:
            raise config.error("texts do not go through the model's plain forward pass (modality_config)")
        for name in ("config_args", "config_kwargs", *(() if may_expand else ("query_expansion",))):
            if config.get(name):
                raise config.error(f"{name} is not supported")
        objects = {name: config.inner(name) for name in ("tokenizer_args", "processor_kwargs", "processing_kwargs")}
        processing = objects["processing_kwargs"]
        processing.inner("chat_template")
        for part in ("text", "common"):
            for name, value in processing.inner(part).items():
                if name not in _WITHOUT_EFFECT and (name, value) != ("truncation", True):
                    raise config.error(f"processing_kwargs.{part}.{name} is not supported")
        return {**config, **objects}

    def max_tokens(self, sentence_bert: JsonMapping) -> int:
        """The limit of sentence_bert_config.json, else the tokenizer's; at most the number of positions."""
        positions = self.num_positions
        limits = [] if positions is None else [positions]
        stated = sentence_bert.get("max_seq_length")
        for name in ("tokenizer_args", "processor_kwargs"):
            stated = sentence_bert.get(name, {}).get("model_max_length", stated)
        if stated is None:
            stated = self.optional(self.place, "tokenizer_config.json").get("model_max_length")
        # Tokenizers without a limit have 1e30.
        if isinstance(stated, int | float) and 0 < stated < 1e9:
            limits.append(int(stated))
        if not limits:
            raise self.config.error("neither it nor the tokenizer says how long a text may be")
        return min(limits)

    @property
    def num_positions(self) -> int | None:
        """Most tokens of a sequence; None where there is no table of limited length."""
        config = self.config
        positions = config.get("max_position_embeddings", config.get("n_positions"))
        if not isinstance(positions, int) or positions <= 0:
            return None
        if config["model_type"] in POSITIONS_AFTER_PADDING:
            pad_token_id = config.get("pad_token_id")
            if pad_token_id is None or config["model_type"] == "mpnet":
                pad_token_id = 1  # the default of these families, and MPNet's only value
            positions -= pad_token_id + 1
        return positions

    @cached_property
    def prompts(self) -> tuple[str, tuple[tuple[str, str], ...]]:
        """The default prompt, and all by their names."""
        prompts = self.stated.get("prompts") or {}
        if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
            raise self.stated.error("prompts must be an object of strings")
        default = self.stated.get("default_prompt_name")
        if default is None and self.routes and self.task in prompts:
            default = self.task  # as `encode_query` and `encode_document` do
        # These two names always exist, with no text unless the file gives them one.
        if default not in (None, "query", "document", *prompts):
            raise self.stated.error(f"default_prompt_name {default!r} is not among its prompts")
        return prompts.get(default) or "", tuple((name, text or "") for name, text in prompts.items())

    def of_transformer(self, sentence_bert: JsonMapping) -> JsonObject:
        """The fields of a card that are read alike of all transformers. `sentence_bert`: the settings of its module."""
        sizes = {name: self.config[name] for name in ("model_type", "hidden_size", "vocab_size")}
        lowercase, max_tokens = bool(sentence_bert.get("do_lower_case", False)), self.max_tokens(sentence_bert)
        return {**sizes, "max_tokens": max_tokens, "lowercase": lowercase, "end": self.end}

    @property
    def end(self) -> str:
        """The token that gte-Qwen2's own class of tokenizers puts behind a text, and tokenizer.json does not; empty for
        any other class: beside a tokenizer.json, transformers' own do not read `add_eos_token`."""
        config = self.optional(self.place, "tokenizer_config.json")
        code, end = config.inner("auto_map").get("AutoTokenizer"), config.get("eos_token")
        # Its name alone, or behind a repository's and "--", as transformers saves a model that it loaded from a hub.
        if "tokenization_qwen.Qwen2TokenizerFast" not in str(code) or not config.get("add_eos_token", True):
            return ""
        end = end.get("content") if isinstance(end, dict) else end
        if not isinstance(end, str) or not end:
            raise config.error(f"eos_token is {end!r:.80}, and must be the token behind a text")
        return end


def _read_config(config: ModelSettings) -> ModelSettings:
    if config.get("model_type") in _OF_IMAGES:
        raise config.error(f"a model of type {config['model_type']} has images; vecd serves text")
    if "quantization_config" in config:
        raise config.error("quantized weights (quantization_config) are not supported")
    # transformers would load any file that is named here, even a pickle.
    if config.get("transformers_weights") is not None:
        raise config.error("weights under another name (transformers_weights) are not supported")
    if (architecture := architecture_of(config)) in _OTHER_RANKINGS:
        raise config.error(f"{architecture} is not supported: {_OTHER_RANKINGS[architecture]}")
    try:
        config = ModelSettings(config.path, native_config(config) or config)
    except ValueError as error:
        raise config.error(str(error)) from None
    if not isinstance(config.get("model_type"), str):
        raise config.error("model_type is missing")
    # Models that wrap a text model keep its sizes one level down.
    text_config = config.get("text_config")
    if isinstance(text_config, dict):
        config.update(text_config)
    if config["model_type"] == "embedding_gemma2_text":
        # Its hidden states are those behind a projection. Longer contexts than 8,192 tokens are those of its base.
        config["hidden_size"] = config.positive("embedding_dim")
        config["max_position_embeddings"] = min(config.positive("max_position_embeddings"), 8192)
    if type(config.get("pad_token_id")) not in (int, NoneType):
        raise config.error(f"pad_token_id is {config['pad_token_id']!r:.80}, and must be a whole number")
    return config


def names_of(folder: Path, config: JsonMapping) -> str:
    """What names the model: its folder and config.json. In the hub's cache the name is two folders above the files."""
    return f"{'/'.join(folder.parts[-3:])} {config.get('_name_or_path', '')}"


def architecture_of(config: JsonMapping) -> str:
    """The name of its class in transformers; empty if config.json names none."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def is_causal_model(config: JsonMapping) -> bool:
    return architecture_of(config).endswith("ForCausalLM")
