"""The facts and faults of a model that its files show without running it.

Owns the report's part about the model, the refusal of models made for another purpose, and the suggestion for each
refusal. Reads files, starts nothing.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from vecd.base.files import JsonMapping, JsonObject
from vecd.launch.check.report import Problem
from vecd.model.card import ModelCard, ModelError
from vecd.model.files import Folder, source_of, stored_tensors, vocabulary_files
from vecd.model.folder import architecture_of
from vecd.model.steps import Step

_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I8": "int8", "U8": "uint8"}
_BUFFERS = ("I64", "I32", "BOOL")
"""Types of tensors that are no weights: positions, masks."""
_LFS_POINTER = b"version https://git-lfs"
_LFS = "fetch the files themselves: git lfs pull in the model's repository, or let vecd fetch it by its hub id"
_AGAIN = "fetch it again, and compare its size or checksum with the original's"
_EXPORT = (
    "save it anew with sentence-transformers (model.save_pretrained), which writes every file that is needed, "
    "safetensors among them"
)


def describe(card: ModelCard, name: str) -> JsonObject:
    """The report's facts of a model. Raises ModelError for weights that are not whole, or lack a tensor that the index
    names."""
    config = Folder(Path(card.weights_folder)).optional("config.json")  # static embeddings need none
    elements: Counter[str] = Counter()
    for path in _weights_files(card):
        for tensor in stored_tensors(path).values():
            if tensor.kind not in _BUFFERS:
                elements[_NAMES.get(tensor.kind, tensor.kind)] += math.prod(tensor.shape)
    heads = {"score": card.score, "sparse": card.sparse, "tokens": card.tokens}

    def of_card(*names: str) -> JsonObject:
        return {name: getattr(card, name) for name in names}

    return {
        "name": name,
        "folder": source_of(card.folder),
        "model_type": card.model_type,
        "architecture": architecture_of(config),
        **of_card("dim", "hidden_size", "max_tokens", "pooling"),
        "steps": tuple(map(_describe_step, card.steps)),
        "is_normalized": card.is_normalized,
        "prompts": dict(card.prompts),
        "default_prompt": card.prompt,
        **of_card("is_matryoshka", "matryoshka_dims", "vocab_size"),
        "num_parameters": sum(elements.values()),
        "weights_bytes": card.weights_bytes,
        "weights_dtypes": tuple(name for name, _ in elements.most_common()),  # the one with most parameters first
        "tokenizer": _describe_tokenizer(card),
        "capabilities": card.capabilities,
        "labels": () if card.score is None else card.score.labels,
        **of_card("token_dim", "assumption", "truncate_dim"),
        "heads": {name: tuple(map(_describe_step, head.steps)) for name, head in heads.items() if head is not None},
    }


def _describe_step(step: Step) -> str:
    where = step.file or step.tensor
    of = f" ({where})" if where else ""
    match step.kind:
        case "dense":
            return f"Dense {step.in_dim} → {step.out_dim}, {step.activation}{of}"
        case "layer_norm":
            return f"LayerNorm{of}"
        case "logit":
            return f"logit of token {' less that of '.join(map(str, step.rows))}{of}"
    return "Normalize"


def _describe_tokenizer(card: ModelCard) -> str:
    if card.tokenizer_file:
        return Path(card.tokenizer_file).name
    return f"converted from {', '.join(path.name for path in vocabulary_files(Path(card.weights_folder)))}"


# --- the weights ------------------------------------------------------------------------------------------------


def _weights_files(card: ModelCard) -> Iterator[Path]:
    """The safetensors of the transformer and of the modules behind it. Raises ModelError for a wrong index."""
    yield from card.step_files
    if card.export_file:
        return
    files = card.weight_files
    index = Path(card.weights_folder, "model.safetensors.index.json")
    has_index = files[0].name != "model.safetensors"
    places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if has_index else {}
    for file in files:
        missing = {name for name, place in places.items() if place == file.name} - stored_tensors(file).keys()
        if missing:
            raise ModelError(f"{file}: {min(missing)} is missing, which {index.name} says is there")
        yield file


# --- its purpose ---------------------------------------------------------------------------------------------


_OTHER_PURPOSES = (
    (
        ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"),
        "generates text, and no modules.json says how to make vectors of it: its hidden states were never trained to "
        "be compared",
        "take a model that was trained for embeddings; if this one was, say its --pooling, or add the modules.json and "
        "1_Pooling/config.json that sentence-transformers saves",
    ),
    (
        ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice"),
        "was trained to classify, and no modules.json says how to make vectors of it",
        "serve it as what it is, without --kind dense; or take the embedding model of the same family",
    ),
)
"""The ends of transformers' names of classes, the fault, and what to do."""


def purpose(model: JsonMapping) -> tuple[list[Problem], list[str]]:
    """Problems and warnings for a model whose files do not say that it embeds texts. `vecd serve` would serve it, but
    its vectors would mean little."""
    if not model["assumption"]:
        return [], []
    for suffixes, fault, suggestion in _OTHER_PURPOSES:
        if model["architecture"].endswith(suffixes):
            return [Problem(f"{model['architecture']} {fault}", suggestion)], []
    return [], [model["assumption"]]


# --- what to do about it ----------------------------------------------------------------------------------------

_SUGGESTIONS = (
    (r"hub cannot be reached", "check the name; fetch it once where there is a network (hf download MODEL) and copy "
     "the cache, or give the folder's path; HF_HUB_OFFLINE=1 forbids fetching"),
    (r"hub has no such model", "check the name; of a private model, set HF_TOKEN"),
    (r"this revision", "name another --revision, or none"),
    (r"asks for permission|HF_TOKEN", "accept the terms on the model's page, and set HF_TOKEN"),
    (r"tokenizer\.json beside it", "copy tokenizer.json from the model that this one was made from"),
    (r"is in the GGUF format|\.gguf: ", "take another file (--file), in F32, F16, BF16 or Q8_0, or the model that it "
     "was made from, mostly the same name without GGUF"),
    (r"is a file, and", "name the folder that it is in"),
    (r"/adapter_(config\.json|model\.safetensors): ",
     "merge it into its base (merge_and_unload of peft), and save the result with its tokenizer"),
    (r"has images", "take a model for text alone"),
    (r"without modules\.json", "give the --kind, or add the modules.json that sentence-transformers saves"),
    (r"--file '.*' given", "name one of these files, by its path in the model's folder, or none"),
    (r"has no adapter", "name one of these behind the model and /, or none"),
    (r"--(kind|pooling) [\w-]+ given", "leave it out, or take a model of that kind"),
    (r"no such folder", "check the path; a model of the hub is named owner/name, without a leading ./ or /"),
    (r"git-lfs", _LFS),
    (r"cut off|behind its tensors|not a safetensors file|is damaged|is missing, which", _AGAIN),
    (r"pickle", _EXPORT),
    (r"tokenizer\.json: file missing", "copy tokenizer.json from the model that this one was made from, or " + _EXPORT),
    (r"model\.safetensors: file missing", f"copy the weights into the folder, or {_EXPORT}"),
    (r"file missing", f"copy the file from the original, or {_EXPORT}"),
    (r"not a tokenizer|takes no vocabulary|converts the tokenizer", "copy tokenizer.json from the model that this one "
     "was made from; for sentencepiece files: pip install 'vecd[convert]'"),
    (r"of different models", "copy tokenizer.json and config.json from the same model"),
    (r"auto_map|sentence-transformers' own", "take a variant of the model that transformers implements itself: vecd "
     "never runs code from a model's folder"),
    (r"has no architecture|has no encoder", "a newer transformers may have it; vecd serves encoders and "
     "decoders of text that transformers implements itself"),
    (r"pooling_mode", "correct 1_Pooling/config.json; other modes cannot be served"),
    (r"quantized weights|quantization_config: ", "take the original weights; --dtype int8 quantizes them itself"),
    (r"in the weights and|the weights lack|config\.json has no place|in_features", "config.json and the weights are of "
     "different models: copy both from the same one"),
    (r"nan or infinity|not finite", "the weights are broken, or overflow in this type: fetch them again, or try "
     "--dtype float32; of a model of your own, look for the step of training after which they were"),
    (r"ONNX Runtime cannot|its outputs are|its input|its hidden states|not those of", "export it anew "
     "in float32 (optimum-cli export onnx --task feature-extraction), or serve the weights that it was made of"),
    (r"--accept-unordered", "the template must be the one that the model was trained with: compare chat_template.jinja "
     "and config_sentence_transformers.json with the original's"),
    (r": (yes|no|template) |is not one token of", "correct yes, no and template in the model's table [models.NAME]"),
    (r"reference vectors (from|are not known)", "run vecd check --remember on the folder that the export was made of, "
     "and copy vecd-reference.json from there"),
    (r"not supported|version of this model that is served", "take another model, or serve this one with "
     "sentence-transformers itself"),
    (r"SIGKILL|MemoryError|out of memory|can't allocate memory", "take a smaller model, or a machine with more memory"),
    (r"SIGILL", "the installed torch uses instructions that this processor lacks: install another build"),
    (r"no answer within", "raise --start-timeout; a disk or network drive may be slow"),
    (r"cannot be written", "copy the model to a folder that this user can write to, and check it there"),
    (r"cannot be read", f"look at the file: it must be whole, and readable by this user; {_AGAIN}"),
    (r"\.json: ", "correct the file, or copy it from the original"),
    (r"cannot be loaded", "compare config.json with the original's: its sizes must be those of the weights"),
)  # fmt: skip
"""The first pattern found in a message decides. The messages come from `vecd.model.card`,
`vecd.workers.torch.loading` and others; a test compares each pattern with the real message."""

UNKNOWN = "see whether sentence-transformers loads it; if it does, vecd should: please report it"


def problem(message: str) -> Problem:
    path = message.partition(": ")[0]
    if _is_lfs_pointer(Path(path)):
        return Problem(f"{path}: is a pointer of git-lfs, not the file itself", _LFS)
    for pattern, suggestion in _SUGGESTIONS:
        if re.search(pattern, message):
            return Problem(message, suggestion)
    return Problem(message, UNKNOWN)


def _is_lfs_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except (OSError, ValueError):
        return False
