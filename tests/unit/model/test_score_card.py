"""Folders of classifiers and cross-encoders: their kind, labels, activation and head. No test loads a weight."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.model.test_card import CONFIG, POOLING, TRANSFORMER, Folder, modules
from vecd.model.steps import ScoreHead, Step
from vecd.shm.output import Output

ONE: dict[str, Any] = {"id2label": {"0": "LABEL_0"}}
TWO: dict[str, Any] = {"id2label": {"1": "good", "0": "bad"}}
LOGITS = {"transformer_task": "sequence-classification", "module_output_name": "scores"}


class Classifier(Folder):
    """A plain transformers folder of a model for classification, until a test changes it."""

    def __init__(self, path: Path, architecture: str = "BertForSequenceClassification", **settings: Any) -> None:
        super().__init__(path)
        (path / "modules.json").unlink()
        self.write("config.json", {**CONFIG, "architectures": [architecture], **settings})

    def state(self, **fields: Any) -> "Classifier":
        self.change("config_sentence_transformers.json", **fields)
        return self

    @property
    def score(self) -> ScoreHead:
        score = self.read().score
        assert score is not None
        return score


# --- kinds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "stated", "kind", "capabilities"),
    [
        (ONE, "", "auto", ("rerank", "classify")),
        (ONE, "", "classify", ("classify",)),
        (TWO, "", "auto", ("classify",)),
        (TWO, "", "rerank", ("rerank", "classify")),
        (TWO, "", "dense", ("dense",)),
        (TWO, "CrossEncoder", "auto", ("rerank", "classify")),
        ({"num_labels": 3}, "CrossEncoder", "auto", ("classify",)),
    ],
)
def test_the_number_of_labels_and_kind_say_what_a_classifier_can_do(
    settings: dict[str, Any], stated: str, kind: str, capabilities: tuple[str, ...], tmp_path: Path
) -> None:
    assert Classifier(tmp_path, **settings).state(model_type=stated).read(kind).capabilities == capabilities


def test_a_token_classifier(tmp_path: Path) -> None:
    folder = Classifier(tmp_path, "BertForTokenClassification", **TWO)
    card = folder.read()
    assert card.capabilities == ("token-classify",)
    assert (card.main_output, card.dim, card.row_dim) == (Output.TOKEN_SCORES, 2, 2)
    assert (folder.score.pooling, len(folder.score.steps)) == ("", 1)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("token-classify", "--kind token-classify given, and the model has the head for rerank and classify only"),
        ("sparse", "is not a sparse model"),
    ],
)
def test_a_kind_that_a_classifier_has_no_head_for_is_refused(kind: str, fault: str, tmp_path: Path) -> None:
    assert fault in Classifier(tmp_path, **ONE).refusal(kind)


@pytest.mark.parametrize("kind", ["rerank", "token-classify"])
@pytest.mark.parametrize("architecture", ["BertModel", "BertForPreTraining"])
def test_an_embedder_is_never_served_as_a_reranker(architecture: str, kind: str, tmp_path: Path) -> None:
    folder = Classifier(tmp_path, architecture)
    assert (folder.read().capabilities, folder.read().has_segments) == (("dense",), False)
    assert f"--kind {kind} given, and the model has vectors only" in folder.refusal(kind)
    folder.write("modules.json", modules(TRANSFORMER, POOLING))
    assert f"--kind {kind} given, and the model has vectors only" in folder.refusal(kind)


def test_modules_with_pooling_make_an_embedder_of_a_classifier(tmp_path: Path) -> None:
    folder = Classifier(tmp_path, **ONE)
    folder.write("modules.json", modules(TRANSFORMER, POOLING))
    assert folder.read().capabilities == ("dense",)
    folder.write("sentence_bert_config.json", LOGITS)
    assert "is not an embedding model's" in folder.refusal()


def test_a_cross_encoder_with_modules(tmp_path: Path) -> None:
    folder = Classifier(tmp_path, **ONE).state(model_type="CrossEncoder")
    folder.write("modules.json", modules(TRANSFORMER))
    modality = {"text": {"method": "forward", "method_output_name": "logits"}}
    folder.write("sentence_bert_config.json", {**LOGITS, "modality_config": modality})
    assert folder.read().capabilities == ("rerank", "classify")
    folder.change("config.json", architectures=["BertModel"])
    assert "model_type is CrossEncoder, and the weights are those of 'BertModel'" in folder.refusal()
    assert "is not an embedding model's" in folder.refusal("dense")


def test_an_export_of_a_classifier_has_its_card(tmp_path: Path) -> None:
    folder = Classifier(tmp_path, **ONE)
    plain = folder.read()
    (tmp_path / "model.safetensors").unlink()
    folder.write("onnx/model.onnx", "")
    card = folder.read()
    assert card.export_file == str(tmp_path / "onnx/model.onnx")
    assert (card.score, card.capabilities, card.dim) == (plain.score, plain.capabilities, plain.dim)


def test_the_shortest_limit_is_that_of_pairs(tmp_path: Path) -> None:
    folder = Classifier(tmp_path, "RobertaForSequenceClassification", **ONE, model_type="roberta", pad_token_id=1)
    assert folder.read().max_tokens == 62
    folder.write("tokenizer_config.json", {"model_max_length": 50})
    assert folder.read().max_tokens == 50


# --- labels and activation --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        (TWO, ("bad", "good")),
        ({"num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2")),
        ({"id2label": {str(index): f"l{index}" for index in range(12)}}, tuple(f"l{index}" for index in range(12))),
    ],
)
def test_labels(settings: dict[str, Any], labels: tuple[str, ...], tmp_path: Path) -> None:
    folder = Classifier(tmp_path, **settings)
    assert (folder.score.labels, folder.read().num_labels) == (labels, len(labels))


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label must have a name for each index"),
        ({**TWO, "num_labels": 3}, "num_labels is 3, and id2label has 2 names"),
        ({"num_labels": 10**9}, "num_labels is 1000000000, and must be a whole number from 1 to 65,536"),
        ({"model_type": "modernbert", "classifier_pooling": "max"}, "classifier_pooling is 'max'; known: cls, mean"),
        ({"auto_map": {"AutoModelForSequenceClassification": "modeling.Mine"}}, "asks for Python code"),
    ],
)
def test_settings_that_cannot_be_served(settings: dict[str, Any], fault: str, tmp_path: Path) -> None:
    Classifier(tmp_path, **settings).assert_refused("config.json", fault)


_IDENTITY, _TANH = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Tanh"
_OLD = {"sbert_ce_default_activation_function": _IDENTITY}


@pytest.mark.parametrize(
    ("settings", "stated", "activation"),
    [
        (ONE, {}, "sigmoid"),
        (TWO, {}, "softmax"),
        ({**TWO, "problem_type": "multi_label_classification"}, {}, "sigmoid"),
        ({**TWO, "problem_type": "regression"}, {}, "identity"),
        ({**ONE, **_OLD}, {}, "identity"),
        # Newer files say it with more authority.
        ({**ONE, **_OLD, "sentence_transformers": {"activation_fn": _TANH}}, {}, "tanh"),
        ({**ONE, "sentence_transformers": {"activation_fn": _TANH}}, {"activation_fn": _IDENTITY}, "identity"),
    ],
)
def test_the_activation_is_the_model_s_own(
    settings: dict[str, Any], stated: dict[str, str], activation: str, tmp_path: Path
) -> None:
    assert Classifier(tmp_path, **settings).state(**stated).score.activation == activation


@pytest.mark.parametrize(
    ("stated", "fault"),
    [
        *(
            ({"activation_fn": name}, f"activation_fn (config_sentence_transformers.json) is {name!r}")
            for name in ("os.system", "torch.nn.modules.activation.ReLU", ["torch.nn.Tanh"])
        ),
        ({"model_type": "CrossEncoder", "prompts": {"q": "ask: "}, "default_prompt_name": "q"}, "default_prompt_name"),
    ],
)
def test_what_sentence_transformers_cannot_have_saved_is_refused_by_its_name(
    stated: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    assert fault in Classifier(tmp_path, **ONE).state(**stated).refusal()


# --- heads ------------------------------------------------------------------------------------------------------


def test_the_head_of_bert(tmp_path: Path) -> None:
    folder = Classifier(tmp_path, **TWO)
    card, score = folder.read(), folder.score
    assert (card.dim, card.num_labels, card.row_dim, card.hidden_size) == (2, 2, 2, 32)
    assert (card.pooling, card.steps, card.is_matryoshka, card.outputs) == ((), (), False, frozenset({Output.SCORES}))
    assert (score.architecture, score.pooling) == ("BertForSequenceClassification", "cls")
    assert score.steps == (
        Step("dense", tensor="pooler.dense", in_dim=32, out_dim=32, activation="tanh"),
        Step("dense", tensor="classifier", in_dim=32, out_dim=2),
    )


def test_the_head_of_a_causal_model_is_on_the_last_token(tmp_path: Path) -> None:
    score = Classifier(tmp_path, "Qwen3ForSequenceClassification", **ONE, model_type="qwen3", pad_token_id=7).score
    assert (score.pooling, score.padding_id) == ("lasttoken", 7)
    assert score.steps == (Step("dense", tensor="score", in_dim=32, out_dim=1, bias=False),)


@pytest.mark.parametrize(
    "settings", [{"model_type": "deberta-v2", "pooler_hidden_act": "gelu_fast"}, {"model_type": "funny"}]
)
def test_what_no_table_describes_has_a_score_and_no_steps(settings: dict[str, Any], tmp_path: Path) -> None:
    folder = Classifier(tmp_path, "XForSequenceClassification", **ONE, **settings)
    assert folder.score.steps == ()
    assert folder.read().main_output is Output.SCORES


@pytest.mark.parametrize(
    ("model_type", "inputs", "has_segments"),
    [
        ("bert", None, True),
        ("bert", ["input_ids", "attention_mask"], False),
        ("xlm-roberta", None, False),
    ],
)
def test_the_tokens_of_a_pair_have_types_by_family_and_tokenizer(
    model_type: str, inputs: list[str] | None, has_segments: bool, tmp_path: Path
) -> None:
    model = Classifier(tmp_path, **ONE, model_type=model_type)
    model.change("tokenizer_config.json", model_input_names=inputs)
    assert model.read().has_segments is has_segments
