"""Which causal language models are rerankers, and by which tokens they score."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vecd.shm.card import ModelCard, ModelError, read_card
from vecd.shm.output import Output

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 8,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
VOCAB = {"yes": 3, "no": 4, "Yes": 5, "1": 6, "0": 7}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes the files of a model, without weights in them."""

    def write(name: str = "model", module: dict[str, Any] | None = None, **changes: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        files = {
            "config.json": {**CONFIG, **changes.pop("config", {})},
            "tokenizer.json": {"model": {"vocab": changes.pop("vocab", VOCAB)}, "added_tokens": []},
            **changes.pop("files", {}),
        }
        if module is not None:
            library = "sentence_transformers"
            files["modules.json"] = [
                {"path": "", "type": f"{library}.base.modules.transformer.Transformer"},
                {"path": "1_LogitScore", "type": f"{library}.cross_encoder.modules.logit_score.LogitScore"},
            ]
            files["sentence_bert_config.json"] = {
                "transformer_task": "text-generation",
                "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
            }
            files["1_LogitScore/config.json"] = module
        for path, content in files.items():
            (folder / path).parent.mkdir(exist_ok=True)
            (folder / path).write_text(json.dumps(content))
        (folder / "model.safetensors").write_bytes(b"")
        return folder

    return write


def test_a_logit_score_module_makes_a_reranker(write: Callable[..., Path]) -> None:
    card = read_card(write(module={"true_token_id": 9, "false_token_id": 2}))
    assert card.capabilities == ("rerank",)
    assert card.main_output is Output.SCORES
    assert card.outputs == {Output.SCORES}
    assert (card.dim, card.num_labels, card.row_dim) == (1, 1, 1)
    assert card.score is not None
    assert (card.score.activation, card.score.pooling, card.score.labels) == ("sigmoid", "lasttoken", ("LABEL_0",))
    (step,) = card.score.steps
    assert (step.kind, step.tensor, step.rows, step.cap) == ("logit", "lm_head", (9, 2), 0.0)
    assert ModelCard.from_json(json.loads(json.dumps(card.to_json()))) == card


@pytest.mark.parametrize(
    ("config", "tensor", "cap"),
    [
        ({"tie_word_embeddings": True}, "embed_tokens", 0),
        ({"model_type": "gemma"}, "embed_tokens", 0),
        ({"model_type": "gemma", "tie_word_embeddings": False}, "lm_head", 0),
        ({"model_type": "gemma2"}, "embed_tokens", 30),
        ({"model_type": "gemma2", "final_logit_softcapping": 5}, "embed_tokens", 5),
        ({"model_type": "gemma2", "final_logit_softcapping": None}, "embed_tokens", 0),
    ],
)
def test_the_output_layer_follows_the_settings(
    config: dict[str, Any], tensor: str, cap: float, write: Callable[..., Path]
) -> None:
    head = read_card(write(module={"true_token_id": 9}, config=config)).score
    assert head is not None
    assert (head.steps[0].tensor, head.steps[0].cap, head.steps[0].rows) == (tensor, cap, (9,))


def test_the_activation_is_the_one_that_was_saved(write: Callable[..., Path]) -> None:
    def files(name: str) -> dict[str, Any]:
        return {"config_sentence_transformers.json": {"activation_fn": name}}

    module = {"true_token_id": 9}
    head = read_card(write(module=module, files=files("torch.nn.modules.linear.Identity"))).score
    assert head is not None
    assert head.activation == "identity"
    with pytest.raises(ModelError, match=r"activation_fn is 'os\.system'; known: torch\.nn\.modules"):
        read_card(write("other", module=module, files=files("os.system")))


@pytest.mark.parametrize(
    "module",
    [
        {},
        {"true_token_id": 50},
        {"true_token_id": -1},
        {"true_token_id": True},
        {"true_token_id": 9, "false_token_id": "no"},
        {"true_token_id": 9, "module_input_name": "logits"},
    ],
)
def test_a_broken_module_is_refused(module: dict[str, Any], write: Callable[..., Path]) -> None:
    with pytest.raises(ModelError, match=r"1_LogitScore/config\.json: "):
        read_card(write(module=module))


@pytest.mark.parametrize(
    ("name", "model_type", "rows", "after"),
    [
        ("models--Qwen--Qwen3-Reranker-0.6B/snapshots/abc", "qwen3", (3, 4), "<think>\n\n</think>\n\n"),
        ("mxbai-rerank-base-v2", "qwen2", (6, 7), "Relevance:<|im_end|>\n<|im_start|>assistant\n"),
        ("bge-reranker-v2-gemma", "gemma", (5,), "\n{instruction}"),
    ],
)
@pytest.mark.parametrize("kind", ["auto", "rerank"])
def test_known_models_are_found_by_name(
    kind: str, name: str, model_type: str, rows: tuple[int, ...], after: str, write: Callable[..., Path]
) -> None:
    architecture = f"{model_type.capitalize()}ForCausalLM"
    folder = write(name, config={"model_type": model_type, "architectures": [architecture]})
    head = read_card(folder, kind).score
    assert head is not None
    assert head.pair_template is not None
    assert head.steps[0].rows == rows
    assert head.pair_template.after.endswith(after)
    assert read_card(folder, "dense").capabilities == ("dense",)


def test_other_causal_models_stay_what_they_were(write: Callable[..., Path]) -> None:
    folder = write()
    assert read_card(folder).capabilities == ("dense",)
    with pytest.raises(ModelError, match="nothing says which tokens mean yes and no"):
        read_card(folder, "rerank")


def test_a_folder_far_above_a_model_does_not_name_it(write: Callable[..., Path]) -> None:
    assert read_card(write("qwen3-reranker-lab/models/embedder/v1")).capabilities == ("dense",)


def test_the_words_must_be_tokens(write: Callable[..., Path]) -> None:
    folder = write("qwen3-reranker", vocab={"yes": 3, "n": 4, "o": 5})
    with pytest.raises(ModelError, match="'no' is not one token of the vocabulary"):
        read_card(folder)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("JinaForRanking", "listwise"),
        ("LayerWiseMiniCPMForCausalLM", "layerwise"),
        ("CostWiseGemmaForCausalLM", "lightweight"),
    ],
)
def test_rerankers_that_do_not_score_pairs_are_refused(
    architecture: str, reason: str, write: Callable[..., Path]
) -> None:
    with pytest.raises(ModelError, match=f"{architecture} is not supported: {reason}"):
        read_card(write(config={"architectures": [architecture]}))
