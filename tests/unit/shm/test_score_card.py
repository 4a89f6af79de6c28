"""Folders of classifiers and cross-encoders: their kind, labels, activation and head. No test loads a weight."""

from pathlib import Path
from typing import Any

import pytest

from tests.unit.shm.test_card import CONFIG, Folder, modules, write
from vecd.shm.card import ModelCard, ModelError, read_card
from vecd.shm.heads import Step
from vecd.shm.output import Output

ONE: dict[str, Any] = {"id2label": {"0": "LABEL_0"}}
TWO: dict[str, Any] = {"id2label": {"1": "good", "0": "bad"}}
LOGITS = {"transformer_task": "sequence-classification", "module_output_name": "scores"}


class Classifier(Folder):
    """A plain transformers folder of a model for classification, until a test changes it."""

    def __init__(self, path: Path, architecture: str = "BertForSequenceClassification", **settings: Any) -> None:
        super().__init__(path)
        (path / "modules.json").unlink()
        write(path / "config.json", {**CONFIG, "architectures": [architecture], **settings})

    def state(self, **fields: Any) -> "Classifier":
        self.change("config_sentence_transformers.json", **fields)
        return self

    def card(self, kind: str = "auto") -> ModelCard:
        return read_card(self.path, kind)


# --- kinds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "kind", "capabilities"),
    [
        (ONE, "auto", ("rerank", "classify")),
        (ONE, "rerank", ("rerank", "classify")),
        (ONE, "classify", ("classify",)),
        (TWO, "auto", ("classify",)),
        (TWO, "classify", ("classify",)),
        (TWO, "rerank", ("rerank", "classify")),
        (TWO, "dense", ("dense",)),
        ({}, "auto", ("classify",)),
    ],
)
def test_the_number_of_labels_and_kind_say_what_a_classifier_can_do(
    settings: dict[str, Any], kind: str, capabilities: tuple[str, ...], tmp_path: Path
) -> None:
    assert Classifier(tmp_path, **settings).card(kind).capabilities == capabilities


def test_a_cross_encoder_of_two_labels_reranks(tmp_path: Path) -> None:
    assert Classifier(tmp_path, **TWO).state(model_type="CrossEncoder").card().capabilities == ("rerank", "classify")


def test_a_cross_encoder_of_three_labels_classifies_pairs_and_ranks_nothing(tmp_path: Path) -> None:
    names = {"0": "contradiction", "1": "entailment", "2": "neutral"}
    folder = Classifier(tmp_path, id2label=names).state(model_type="CrossEncoder")
    assert folder.card().capabilities == ("classify",)
    with pytest.raises(ModelError, match="--kind rerank given, and the model has the head for classify only"):
        folder.card("rerank")


def test_a_token_classifier(tmp_path: Path) -> None:
    card = Classifier(tmp_path, "BertForTokenClassification", **TWO).card()
    assert card.capabilities == ("token-classify",)
    assert (card.main_output, card.dim, card.row_dim) == (Output.TOKEN_SCORES, 2, 2)
    assert card.score is not None
    assert (card.score.pooling, len(card.score.steps)) == ("", 1)


def test_the_card_of_a_classifier(tmp_path: Path) -> None:
    card = Classifier(tmp_path, **TWO).card()
    assert (card.dim, card.num_labels, card.row_dim, card.hidden_size) == (2, 2, 2, 32)
    assert (card.pooling, card.steps, card.is_matryoshka) == ((), (), False)
    assert card.outputs == {Output.SCORES}
    assert ModelCard.from_json(card.to_json()) == card


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("token-classify", "--kind token-classify given, and the model has the head for rerank and classify only"),
        ("multi-vector", "--kind multi-vector given, and the model has the head for rerank and classify only"),
        ("sparse", "is not a sparse model"),
    ],
)
def test_a_kind_that_a_classifier_has_no_head_for_is_refused(kind: str, fault: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=fault):
        Classifier(tmp_path, **ONE).card(kind)


@pytest.mark.parametrize("kind", ["rerank", "classify", "token-classify"])
@pytest.mark.parametrize("architecture", ["BertModel", "BertForPreTraining"])
def test_an_embedder_is_never_served_as_a_reranker(architecture: str, kind: str, tmp_path: Path) -> None:
    folder = Classifier(tmp_path, architecture)
    assert folder.card().capabilities == ("dense",)
    with pytest.raises(ModelError, match=f"--kind {kind} given, and the model has vectors only"):
        folder.card(kind)
    folder.write("modules.json", modules(("Transformer", ""), ("Pooling", "1_Pooling")))
    with pytest.raises(ModelError, match=f"--kind {kind} given, and the model has vectors only"):
        folder.card(kind)


def test_modules_with_pooling_make_an_embedder_of_a_classifier(tmp_path: Path) -> None:
    folder = Classifier(tmp_path, **ONE)
    folder.write("modules.json", modules(("Transformer", ""), ("Pooling", "1_Pooling")))
    assert folder.card().capabilities == ("dense",)


def test_a_cross_encoder_with_modules(tmp_path: Path) -> None:
    folder = Classifier(tmp_path, **ONE).state(model_type="CrossEncoder")
    folder.write("modules.json", modules(("Transformer", "")))
    folder.write(
        "sentence_bert_config.json",
        {**LOGITS, "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}}},
    )
    assert folder.card().capabilities == ("rerank", "classify")
    folder.change("config.json", architectures=["BertModel"])
    with pytest.raises(ModelError, match="model_type is CrossEncoder, and the weights are those of 'BertModel'"):
        folder.card()
    with pytest.raises(ModelError, match="is not an embedding model's"):
        folder.card("dense")


def test_logits_behind_pooling_are_refused(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.write("sentence_bert_config.json", LOGITS)
    with pytest.raises(ModelError, match="is not an embedding model's"):
        read_card(tmp_path)


def test_a_default_prompt_is_refused(tmp_path: Path) -> None:
    folder = Classifier(tmp_path, **ONE).state(
        model_type="CrossEncoder", prompts={"q": "ask: "}, default_prompt_name="q"
    )
    with pytest.raises(ModelError, match="default_prompt_name"):
        folder.card()


def test_an_export_of_a_classifier_has_its_card(tmp_path: Path) -> None:
    folder = Classifier(tmp_path, **ONE)
    plain = folder.card()
    (tmp_path / "model.safetensors").unlink()
    folder.write("onnx/model.onnx", "")
    card = folder.card()
    assert card.export_file == str(tmp_path / "onnx/model.onnx")
    assert (card.score, card.capabilities, card.dim) == (plain.score, plain.capabilities, plain.dim)


def test_code_of_the_repository_for_the_head_is_refused(tmp_path: Path) -> None:
    folder = Classifier(tmp_path, **ONE, auto_map={"AutoModelForSequenceClassification": "modeling.Mine"})
    with pytest.raises(ModelError, match="asks for Python code"):
        folder.card()


def test_the_shortest_limit_is_that_of_pairs(tmp_path: Path) -> None:
    folder = Classifier(tmp_path, "RobertaForSequenceClassification", **ONE, model_type="roberta", pad_token_id=1)
    assert folder.card().max_tokens == 62
    folder.write("tokenizer_config.json", {"model_max_length": 50})
    assert folder.card().max_tokens == 50


# --- labels and activation --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        (TWO, ("bad", "good")),
        ({"num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2")),
        ({}, ("LABEL_0", "LABEL_1")),
        ({"id2label": {str(index): f"l{index}" for index in range(12)}}, tuple(f"l{index}" for index in range(12))),
    ],
)
def test_labels(settings: dict[str, Any], labels: tuple[str, ...], tmp_path: Path) -> None:
    card = Classifier(tmp_path, **settings).card()
    assert card.score is not None
    assert card.score.labels == labels
    assert card.num_labels == len(labels)


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label must have a name for each index"),
        ({"id2label": []}, "id2label must"),
        ({"id2label": {}}, "id2label must"),
        ({"num_labels": 0}, "num_labels is 0"),
        ({"num_labels": "3"}, "num_labels is '3'"),
        ({**TWO, "num_labels": 3}, "num_labels is 3, and id2label has 2 names"),
        ({"num_labels": 10**9}, "num_labels is 1000000000, and must be a whole number from 1 to 65,536"),
        ({"model_type": "modernbert", "classifier_pooling": "max"}, "classifier_pooling is 'max'; known: cls, mean"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], fault: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=fault) as refused:
        Classifier(tmp_path, **settings).card()
    assert str(tmp_path / "config.json") in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "activation"),
    [
        (ONE, "sigmoid"),
        (TWO, "softmax"),
        ({**TWO, "problem_type": "single_label_classification"}, "softmax"),
        ({**TWO, "problem_type": "multi_label_classification"}, "sigmoid"),
        ({**TWO, "problem_type": "regression"}, "identity"),
        ({**ONE, "problem_type": "regression"}, "identity"),
        ({**ONE, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        ({**ONE, "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, "tanh"),
        ({**ONE, "sentence_transformers": {"activation_fn": None}}, "sigmoid"),
    ],
)
def test_the_activation_is_the_model_s_own(settings: dict[str, Any], activation: str, tmp_path: Path) -> None:
    card = Classifier(tmp_path, **settings).card()
    assert card.score is not None
    assert card.score.activation == activation


def test_newer_files_say_the_activation_with_more_authority(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"},
        "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid",
    }
    folder = Classifier(tmp_path, **ONE, **settings)
    score = folder.card().score
    assert score is not None
    assert score.activation == "tanh"
    score = folder.state(activation_fn="torch.nn.modules.linear.Identity").card().score
    assert score is not None
    assert score.activation == "identity"


@pytest.mark.parametrize("name", ["os.system", "torch.nn.modules.activation.ReLU", "Sigmoid", 5, ["torch.nn.Tanh"]])
def test_another_activation_is_refused_by_its_name(name: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"activation_fn \(config_sentence_transformers\.json\) is") as refused:
        Classifier(tmp_path, **ONE).state(activation_fn=name).card()
    assert repr(name) in str(refused.value)


# --- heads ------------------------------------------------------------------------------------------------------


def test_the_head_of_bert(tmp_path: Path) -> None:
    score = Classifier(tmp_path, **TWO).card().score
    assert score is not None
    assert score.architecture == "BertForSequenceClassification"
    assert score.pooling == "cls"
    assert score.steps == (
        Step("dense", tensor="pooler.dense", in_dim=32, out_dim=32, activation="tanh"),
        Step("dense", tensor="classifier", in_dim=32, out_dim=2),
    )


def test_the_head_of_a_causal_model_is_on_the_last_token(tmp_path: Path) -> None:
    folder = Classifier(tmp_path, "Qwen3ForSequenceClassification", **ONE, model_type="qwen3", pad_token_id=7)
    score = folder.card().score
    assert score is not None
    assert (score.pooling, score.padding_id) == ("lasttoken", 7)
    assert score.steps == (Step("dense", tensor="score", in_dim=32, out_dim=1, bias=False),)


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "deberta-v2", "pooler_hidden_act": "gelu_fast"},
        {"model_type": "funny"},
    ],
)
def test_what_no_table_describes_has_a_score_and_no_steps(settings: dict[str, Any], tmp_path: Path) -> None:
    card = Classifier(tmp_path, "XForSequenceClassification", **ONE, **settings).card()
    assert card.score is not None
    assert card.score.steps == ()
    assert card.main_output is Output.SCORES


@pytest.mark.parametrize(("model_type", "has_segments"), [("bert", True), ("xlm-roberta", False), ("mpnet", False)])
def test_the_tokens_of_a_pair_have_types_by_family(model_type: str, has_segments: bool, tmp_path: Path) -> None:
    assert Classifier(tmp_path, **ONE, model_type=model_type).card().has_segments is has_segments


def test_an_embedder_has_no_segments(tmp_path: Path) -> None:
    Folder(tmp_path)
    assert not read_card(tmp_path).has_segments


@pytest.mark.parametrize(
    ("inputs", "has_segments"),
    [(None, True), (["input_ids", "token_type_ids", "attention_mask"], True), (["input_ids", "attention_mask"], False)],
)
def test_a_tokenizer_may_leave_token_types_out(inputs: list[str] | None, has_segments: bool, tmp_path: Path) -> None:
    model = Classifier(tmp_path, **ONE)
    model.change("tokenizer_config.json", model_input_names=inputs)
    assert model.card().has_segments is has_segments
    assert ModelCard.from_json(model.card().to_json()) == model.card()
