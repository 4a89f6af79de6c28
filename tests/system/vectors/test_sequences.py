"""Sequences of pairs and roles are those that sentence-transformers gives its models."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from sentence_transformers.base.modules import Transformer
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.support import tiny_tokenizers
from vecd.gateway.request import Pair, Role, TokenizedInput, Tokenizing
from vecd.gateway.tokenization.tokenizer import PLAIN, Tokenizer
from vecd.model.card import ModelCard, read_card
from vecd.model.steps import PairTemplate, ScoreHead, TokenHead

TEMPLATE = PairTemplate(
    "<|im_start|>system\nJudge<|im_end|>\n<|im_start|>user\n<Query>: ",
    "\n<Document>: ",
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
)


@pytest.fixture
def make() -> Iterator[Callable[[ModelCard, int], Tokenizer]]:
    made: list[Tokenizer] = []

    def make_one(card: ModelCard, max_tokens: int) -> Tokenizer:
        made.append(Tokenizer(card, max_tokens, "auto"))
        return made[-1]

    yield make_one
    for tokenizer in made:
        tokenizer.threads.close()


def tokenize(tokenizer: Tokenizer, given: Any, how: Tokenizing = PLAIN) -> TokenizedInput:
    tokenized = tokenizer.tokenize_now([given], how)
    assert tokenized is not None
    return tokenized[0]


def ids(item: TokenizedInput) -> list[int]:
    return np.frombuffer(item.token_ids, "<i4").tolist()


@pytest.mark.parametrize("max_tokens", [16, 17])
def test_pairs_of_a_cross_encoder(minilm_folder, make, max_tokens):
    reference = Transformer(str(minilm_folder))
    ours = make(read_card(minilm_folder), max_tokens)
    for num_query in (0, 1, 6, 7, 8, 20, 40):
        for num_document in (0, 1, 6, 7, 8, 20, 100):
            pair = Pair("what " * num_query, "that " * num_document)
            expected = reference.preprocess([tuple(pair)], processing_kwargs={"text": {"max_length": max_tokens}})
            item = tokenize(ours, pair)
            border = item.border or item.num_tokens
            assert ids(item) == expected["input_ids"][0].tolist()
            assert expected["token_type_ids"][0].tolist() == [0] * border + [1] * (item.num_tokens - border)


@pytest.mark.parametrize("max_tokens", [140, 200])
def test_pairs_of_an_llm_reranker(minilm_folder, make, tmp_path, max_tokens):
    library = tiny_tokenizers.qwen()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=library, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=200
    )
    content = "{{ messages | selectattr('role', 'eq', 'ROLE') | map(attribute='content') | first }}"
    query, document = (content.replace("ROLE", role) for role in ("query", "document"))
    fast.chat_template = TEMPLATE.before + query + TEMPLATE.between + document + TEMPLATE.after + "\n"  # Jinja drops it
    fast.save_pretrained(tmp_path)
    sizes: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    config = Qwen3Config(vocab_size=library.get_vocab_size(), num_attention_heads=2, num_key_value_heads=1, **sizes)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path)
    reference = Transformer(str(tmp_path), transformer_task="text-generation")
    head = ScoreHead(("LABEL_0",), "sigmoid", "last", pair_template=TEMPLATE)
    card = replace(read_card(minilm_folder), tokenizer_file=str(tmp_path / "tokenizer.json"), score=head)
    ours = make(card, max_tokens)
    for query in ("a fox", "hello world " * 3, "fox " * 10):
        for document in ("a dog", " lead", "b " * 10, "b " * 300, "", "x\n\n", "中文😀" * 20):
            limits = {"text": {"max_length": max_tokens, "truncation": True}}
            expected = reference.preprocess([(query, document)], processing_kwargs=limits)
            assert ids(tokenize(ours, Pair(query, document))) == expected["input_ids"][0].tolist()


@pytest.mark.parametrize(
    ("strategy", "limit", "attends"),
    [("fixed", None, False), ("fixed", None, True), ("min", None, False), ("min", 40, True)],
)
def test_queries_and_documents_of_a_multi_vector_model(minilm_folder, make, strategy, limit, attends):
    expansion = {"strategy": strategy, "attend": attends, "length": 32}
    reference = Transformer(str(minilm_folder), query_expansion=expansion, query_length=limit, document_length=60)
    head = TokenHead(
        (),
        query_prompt="query: ",
        document_prompt="doc: ",
        query_tokens=32,
        max_query_tokens=None if strategy == "fixed" else limit or 0,
        expansion_id=reference.tokenizer.mask_token_id,
        attends_to_expansion=attends,
        document_tokens=60,
    )
    card = read_card(minilm_folder)
    ours = make(replace(card, tokens=head), reference.tokenizer.model_max_length)
    for num_words in (0, 1, 27, 28, 29, 30, 36, 37, 38, 55, 56, 100):
        for role, prompt in ((Role.QUERY, "query: "), (Role.DOCUMENT, "doc: ")):
            text = "what " * num_words
            expected = reference.preprocess([text], prompt=prompt, task=role.value)
            item = tokenize(ours, text, Tokenizing(role=role))
            attended = item.border or item.num_tokens
            assert ids(item) == expected["input_ids"][0].tolist()
            assert expected["attention_mask"][0].tolist() == [1] * attended + [0] * (item.num_tokens - attended)
