"""What files alone tell of a model: whether weights are whole, what it was made for, and what to do about a refusal."""

from dataclasses import replace
from pathlib import Path

import pytest

from vecd.launch.check.model import describe, problem, purpose
from vecd.model.card import ModelError, read_card
from vecd.model.files import stored_tensors


def test_a_pointer_of_git_lfs(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 90000000\n")
    with pytest.raises(ModelError) as raised:
        stored_tensors(weights)
    found = problem(str(raised.value))
    assert found.what == f"{weights}: is a pointer of git-lfs, not the file itself"
    assert "git lfs pull" in found.suggestion


def test_the_bundled_model(minilm_folder: Path) -> None:
    card = read_card(minilm_folder)
    model = describe(card, "all-MiniLM-L6-v2")
    assert model["num_parameters"] == 22_713_216  # without the 512 positions that are stored beside them
    assert model["weights_dtypes"] == ("float32",)
    assert [model[name] for name in ("architecture", "tokenizer", "steps")] == [
        "BertModel", "tokenizer.json", ("Normalize",)
    ]  # fmt: skip
    assert purpose(model) == ([], [])


@pytest.mark.parametrize(
    ("architecture", "says"),
    [
        ("Qwen3ForCausalLM", "generates text"),
        ("BertForSequenceClassification", "to classify"),
        ("BertModel", None),
    ],
)
def test_what_a_plain_transformers_model_was_made_for(architecture: str, says: str | None, minilm_folder: Path) -> None:
    card = replace(read_card(minilm_folder), assumes_pooling=True)
    problems, warnings = purpose({**describe(card, "minilm"), "architecture": architecture})
    assert [says in found.what for found in problems if says] == ([True] if says else [])
    assert ["no modules.json" in warning for warning in warnings] == ([] if says else [True])


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("a/b: no such folder, not in the hub's cache, and the hub cannot be reached", "hf download"),
        (
            "a/b: no such folder, and the hub has no such model (or it is private and HF_TOKEN is not set)",
            "check the name",
        ),
        ("a/b@x: the hub has the model, but not this revision", "--revision"),
        ("a/b: the hub asks for permission: accept the model's terms there and set HF_TOKEN", "HF_TOKEN"),
        ("/x: no such folder", "check the path"),
        ("/x: is in the GGUF format, and has no file in F32, F16, BF16 or Q8_0", "without GGUF"),
        ("/x/a.gguf: 'token_embd.weight' has the format Q4_K; vecd serves F32, F16, BF16 and Q8_0", "--file"),
        (
            "/x/a.gguf: its tokenizer is ('t5', 'default'), which vecd reads from a tokenizer.json beside it",
            "copy token",
        ),
        ("/x/config.json: quantization_config: bitsandbytes is not known; known: fp8", "original weights"),
        ("/x/onnx/a.onnx: its vectors are not those of the safetensors beside it: largest difference 1", "optimum"),
        ("/x/model.safetensors: is a file, and a model is a folder", "name the folder"),
        ("/x/adapter_config.json: use_dora is True: such an adapter is more than a product", "merge_and_unload"),
        ("/x/config.json: a model of type clip has images; vecd serves text", "text alone"),
        ("/x/config.json: causal is True, and the version of this model that is served has", "take another model"),
        ("/x/config.json: BertForMaskedLM without modules.json may be a base model", "--kind"),
        ("/x: --pooling cls given, and the model is for rerank", "leave it out"),
        ("/x: --file 'a.onnx' given, and must be one of the .onnx and .gguf files: there are none", "or none"),
        ("/x: has no adapter 'nope'; it has retrieval, text-matching", "name one of these behind the model"),
        ("/x/tokenizer.json: file missing, and nothing there to make it from", "copy tokenizer.json"),
        ("/x/model.safetensors: file missing (the model's weights)", "copy the weights"),
        ("/x/config.json: file missing", "copy the file"),
        ("/x: weights only as pickle (model.pt); of pickles, vecd converts pytorch_model.bin alone", "save_pretrained"),
        ("/x/a.bin: is a pickle that names os.system, which torch's safe loader refuses", "save_pretrained"),
        ("/x/config.json: transformers 5.23.0 has no architecture 'nosuch' (model_type)", "newer transformers"),
        (
            "/x/config.json: asks for Python code … (auto_map: x) …; transformers has no architecture that",
            "never runs code",
        ),
        ("/x/modules.json: module a.B is not sentence-transformers' own, which vecd refuses", "never runs code"),
        ("/x/1_Pooling/config.json: pooling_mode 'vibes' is unknown; known: cls", "correct 1_Pooling"),
        ("/x: w is [1] in the weights and [2] in config.json", "different models"),
        ("/x: the weights lack encoder.layer.6, which config.json calls for", "different models"),
        ("/x: the reference model's vectors in float32 contain nan or infinity", "broken"),
        ("the process was killed by SIGKILL, as the kernel does when memory runs out, while busy with: load", "memory"),
        ("the process was killed by SIGILL, while busy with: load", "another build"),
        ("/x/onnx/model.onnx: ONNX Runtime cannot load it: Fail: a.B(-1) is not a registered function/op", "optimum"),
        ("/x/onnx/model.onnx: its input ids, tensor(int64), is not supported", "optimum"),
        ("/x/onnx/model.onnx: its vectors are not those of vecd-reference.json: largest difference 1", "optimum"),
        ("/x/onnx/model.onnx: an ONNX export has no weights to compute reference vectors from", "copy vecd-reference"),
        ("/x: its reference vectors are not known, and an ONNX export has no weights", "copy vecd-reference"),
        ("/x/vecd-reference.json: cannot be written: Permission denied", "can write to"),
        ("/x/config.json: must be a JSON object", "correct the file"),
        ("/x: cannot be loaded: ZeroDivisionError: integer modulo by zero", "compare config.json"),
        ("/x: cannot be loaded: RuntimeError: DefaultCPUAllocator: can't allocate memory", "more memory"),
        ("something that nobody has thought of", "report it"),
    ],
)
def test_every_refusal_comes_with_something_to_do(message: str, hint: str) -> None:
    found = problem(message)
    assert found.what == message
    assert hint in found.suggestion
