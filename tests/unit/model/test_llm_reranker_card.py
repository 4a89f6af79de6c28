"""Which causal language models are rerankers, and by which tokens they score."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.model_folders import ModelFolder
from vecd.model.steps import ScoreHead
from vecd.shm.output import Output

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 8,
    "vocab_size": 50,
    "max_position_embeddings": 64,
}
VOCAB = {"yes": 3, "no": 4, "Yes": 5, "1": 6, "0": 7}


class Folder(ModelFolder):
    """A causal model without weights."""

    def __init__(self, path: Path, **config: Any) -> None:
        super().__init__(path)
        self.write("config.json", {**CONFIG, **config})
        self.write("tokenizer.json", {"model": {"vocab": VOCAB}, "added_tokens": []})
        self.write("model.safetensors", "")

    def add_module(self, **settings: Any) -> "Folder":
        """Make it a CrossEncoder of sentence-transformers with a LogitScore."""
        library = "sentence_transformers"
        modules = [
            {"path": "", "type": f"{library}.base.modules.transformer.Transformer"},
            {"path": "1_LogitScore", "type": f"{library}.cross_encoder.modules.logit_score.LogitScore"},
        ]
        modality = {"text": {"method": "forward", "method_output_name": "logits"}}
        self.write("modules.json", modules)
        self.write("sentence_bert_config.json", {"transformer_task": "text-generation", "modality_config": modality})
        self.write("1_LogitScore/config.json", settings)
        return self

    @property
    def head(self) -> ScoreHead:
        head = self.read().score
        assert head is not None
        return head


def test_a_logit_score_module_makes_a_reranker(tmp_path: Path) -> None:
    folder = Folder(tmp_path).add_module(true_token_id=9, false_token_id=2)
    card, head = folder.read(), folder.head
    assert card.capabilities == ("rerank",)
    assert card.main_output is Output.SCORES
    assert card.outputs == {Output.SCORES}
    assert (card.dim, card.num_labels, card.row_dim) == (1, 1, 1)
    assert (head.activation, head.pooling, head.labels) == ("sigmoid", "lasttoken", ("LABEL_0",))
    (step,) = head.steps
    assert (step.kind, step.tensor, step.rows, step.cap) == ("logit", "lm_head", (9, 2), 0.0)
    # The one that was saved, if there is one.
    folder.change("config_sentence_transformers.json", activation_fn="torch.nn.modules.linear.Identity")
    assert folder.head.activation == "identity"
    folder.change("config_sentence_transformers.json", activation_fn="os.system")
    assert "activation_fn is 'os.system'; known: torch.nn.modules" in folder.refusal()


@pytest.mark.parametrize(
    ("config", "tensor", "cap"),
    [
        ({"tie_word_embeddings": True}, "embed_tokens", 0),
        ({"model_type": "gemma", "tie_word_embeddings": False}, "lm_head", 0),
        ({"model_type": "gemma2", "final_logit_softcapping": 5}, "embed_tokens", 5),
        ({"model_type": "gemma2", "final_logit_softcapping": None}, "embed_tokens", 0),
    ],
)
def test_the_output_layer_follows_the_settings(config: dict[str, Any], tensor: str, cap: float, tmp_path: Path) -> None:
    head = Folder(tmp_path, **config).add_module(true_token_id=9).head
    assert (head.steps[0].tensor, head.steps[0].cap, head.steps[0].rows) == (tensor, cap, (9,))


@pytest.mark.parametrize(
    "module",
    [
        {},
        {"true_token_id": 50},
        {"true_token_id": 9, "false_token_id": "no"},
        {"true_token_id": 9, "module_input_name": "logits"},
    ],
)
def test_a_broken_module_is_refused(module: dict[str, Any], tmp_path: Path) -> None:
    Folder(tmp_path).add_module(**module).assert_refused("1_LogitScore/config.json", "")


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
    kind: str, name: str, model_type: str, rows: tuple[int, ...], after: str, tmp_path: Path
) -> None:
    architecture = f"{model_type.capitalize()}ForCausalLM"
    folder = Folder(tmp_path / name, model_type=model_type, architectures=[architecture])
    head = folder.read(kind).score
    assert head is not None
    assert head.pair_template is not None
    assert head.steps[0].rows == rows
    assert head.pair_template.after.endswith(after)
    assert folder.read("dense").capabilities == ("dense",)


def test_other_causal_models_stay_what_they_were(tmp_path: Path) -> None:
    """Also far below a folder with such a name."""
    folder = Folder(tmp_path / "qwen3-reranker-lab/models/embedder/v1")
    assert folder.read().capabilities == ("dense",)
    assert "nothing says which tokens mean yes and no" in folder.refusal("rerank")


def test_the_words_must_be_tokens(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "qwen3-reranker")
    folder.change("tokenizer.json", model={"vocab": {"yes": 3, "n": 4, "o": 5}})
    assert "'no' is not one token of the vocabulary" in folder.refusal()


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("JinaForRanking", "listwise"),
        ("LayerWiseMiniCPMForCausalLM", "layerwise"),
        ("CostWiseGemmaForCausalLM", "lightweight"),
    ],
)
def test_rerankers_that_do_not_score_pairs_are_refused(architecture: str, reason: str, tmp_path: Path) -> None:
    assert f"{architecture} is not supported: {reason}" in Folder(tmp_path, architectures=[architecture]).refusal()
