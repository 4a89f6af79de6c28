"""Tiny tokenizers of the kinds that models have, trained on three lines: real rules, a small vocabulary."""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "Hello world, the quick brown fox jumps over the lazy dog. It's 1234.5 o'clock; isn't it?",
    "中文漢字，日本語のテキスト、한국어 텍스트! привет мир? naïve café ½ ＡＢＣ foo bar foo-bar",
    "a b c d e f g h i j k l m n o p q r s t u v w x y z 0 1 2 3 4 5 6 7 8 9 [ ] < > ( ) / + = . , ! ? ' \" \n \t",
]
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _trained_once(make: Callable[[], tokenizers.Tokenizer]) -> Callable[[], tokenizers.Tokenizer]:
    """A copy of the same one each time: training again gives other ids."""
    once = cache(lambda: make().to_str())
    return wraps(make)(lambda: tokenizers.Tokenizer.from_str(once()))


@_trained_once
def bert() -> tokenizers.Tokenizer:
    """[CLS] q [SEP] d [SEP], the document of type 1."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer = trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=300, special_tokens=special, show_progress=False),
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return tokenizer


@_trained_once
def roberta() -> tokenizers.Tokenizer:
    """<s> q </s></s> d </s>, all of type 0."""
    tokenizer = byte_pairs(["<s>", "</s>", "<mask>"], pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return tokenizer


@_trained_once
def xlm_roberta() -> tokenizers.Tokenizer:
    """As RoBERTa's, of unigrams."""
    special = ["<s>", "</s>", "<unk>"]
    tokenizer = trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="<unk>", show_progress=False),
        normalizers.NFKC(),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    )
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return tokenizer


@_trained_once
def qwen() -> tokenizers.Tokenizer:
    """Without a template; ChatML's tokens are special."""
    pattern = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return byte_pairs(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], pattern, normalizers.NFC())


@_trained_once
def gemma() -> tokenizers.Tokenizer:
    """Byte pairs over the whole text, whose blanks are letters: it can be cut nowhere."""
    tokenizer = trained(
        models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True),
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<pad>", "<eos>", "<bos>", "<unk>"], show_progress=False),
        normalizers.Replace(" ", "▁"),
        pre_tokenizers.Split(" ", "merged_with_previous"),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", 2)]
    )
    return tokenizer


KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "bert": bert,
    "roberta": roberta,
    "xlm_roberta": xlm_roberta,
    "qwen": qwen,
    "gemma": gemma,
}
"""Those of models as they are published."""


def document_first() -> tokenizers.Tokenizer:
    """A template that has the document before the query."""
    tokenizer = bert()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $B [SEP] $A:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def byte_pairs(special: list[str], pre_tokenizer: Any, normalizer: Any = None) -> tokenizers.Tokenizer:
    """Over bytes, as GPT-2's."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    return trained(models.BPE(), trainer, normalizer, pre_tokenizer)


def trained(model: Any, trainer: Any, normalizer: Any, pre_tokenizer: Any) -> tokenizers.Tokenizer:
    """On the three lines."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizer
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer
