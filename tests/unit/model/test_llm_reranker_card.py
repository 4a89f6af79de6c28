"""Which causal language models are rerankers, and by which tokens they score."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_folders import ModelFolder
from vecd.model.card import ModelCard, ModelError, card_of
from vecd.model.folder import ModelFolder as LibraryFolder
from vecd.model.steps import PairTemplate, ScoreHead, read_pair_template, with_instruction
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
        ("zerank-1", "qwen3", (5,), "assistant\n"),
        ("ctxl-rerank-v2-instruct-multilingual-1b", "qwen3", (0,), "{ instruction} ??"),
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


@pytest.mark.parametrize("sign", ["base_model", "chat_template", "chat_template.jinja"])
def test_a_copy_under_another_name_is_known_by_its_files(sign: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "legal-ranker")
    assert folder.read().capabilities == ("dense",)
    judge = "<|im_start|>\nJudge whether the Document meets the requirements based on the Query and the Instruct …"
    if sign == "base_model":
        folder.write("README.md", "---\ntags:\n- legal\nbase_model:\n- Qwen/Qwen3-Reranker-0.6B\n---\n")
    elif sign == "chat_template":
        folder.write("tokenizer_config.json", {"chat_template": judge})
    else:
        folder.write(sign, judge)
    assert folder.head.steps[0].rows == (3, 4)
    assert folder.read("dense").score is None


def test_zerank_s_score_is_a_fifth_of_the_logit_and_its_code_is_not_run(tmp_path: Path) -> None:
    code = {"AutoConfig": "zeroentropy/zerank-1-small--modeling_zeranker.ZEConfig"}
    folder = Folder(tmp_path / "zerank-1-small", auto_map=code)
    assert (folder.head.steps[0].scale, folder.head.activation) == (0.2, "sigmoid")
    folder.change("config.json", auto_map={"AutoConfig": "modeling_other.ZEConfig"})
    assert "asks for Python code" in folder.refusal()


def read_with(path: Path, **settings: str) -> ModelCard:
    return card_of(LibraryFolder(path, **settings))


def test_settings_say_how_any_causal_model_scores(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "my-llm")
    folder.change("tokenizer.json", model={"vocab": {**VOCAB, "\u0120yes": 8, "\u2581no": 9}})
    head = read_with(folder.path, yes="1", no="0").score
    assert head is not None
    assert (head.steps[0].rows, head.steps[0].scale, head.pair_template) == ((6, 7), 1.0, None)
    spaced = read_with(folder.path, yes=" yes", no=" no").score
    assert spaced is not None
    assert spaced.steps[0].rows == (8, 9)
    one = read_with(folder.path, kind="rerank", yes="1").score
    assert one is not None
    assert one.steps[0].rows == (6,)
    of_module = folder.add_module(true_token_id=9)
    instead = read_with(of_module.path, yes="1").score
    assert instead is not None
    assert instead.steps[0].rows == (6,)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"yes": "yes yes"}, "'yes yes' is not one token of the vocabulary"),
        ({"yes": "yes", "no": "nope"}, "'nope' is not one token of the vocabulary"),
        ({"no": "no"}, "no given, and yes is not"),
        ({"template": "{query} {document}"}, "template given, and the model is for dense"),
        ({"kind": "dense", "yes": "yes"}, "yes given, and the model is for dense"),
    ],
)
def test_settings_that_do_not_fit_are_refused_in_a_line(settings: dict[str, str], reason: str, tmp_path: Path) -> None:
    folder = Folder(tmp_path / "my-llm")
    with pytest.raises(ModelError) as refused:
        read_with(folder.path, **settings)
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{query}", "must have {document} once, and has it 0 times"),
        ("{query}{document}{query}", "must have {query} once, and has it 2 times"),
        ("{query}{document}{passage}", "has {passage}; known are {query}, {document} and {instruction}"),
        ("{}{query}{document}", "has {}; known"),
    ],
)
def test_a_template_has_each_place_once(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        read_pair_template(text)


def test_a_template_as_text_is_cut_at_its_places() -> None:
    template = read_pair_template("<s>{document} / {query}{ instruction}?", "find")
    assert template == PairTemplate("<s>", " / ", "{ instruction}?", "find", is_document_first=True)
    assert template.has_instruction
    assert [with_instruction(template.after, each) for each in ("", "now")] == ["?", " now?"]
    assert not read_pair_template("{query}|{document}").has_instruction


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
