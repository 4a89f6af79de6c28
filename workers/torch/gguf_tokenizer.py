"""Makes the fast tokenizer's file of the vocabulary in GGUF, for a model without one beside it.

Owns what llama.cpp changes of WordPiece, and the rules that it knows by a name alone. Sources: llama.cpp's conversion/
and src/llama-vocab.cpp.
"""

import json
import unicodedata
from collections.abc import Set

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from vecd.base.files import JsonObject
from vecd.model.files import ModelError, ModelSettings, one_line

_PLACE = "tokenizer.ggml"
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens."""
_WORD_BEGINS = "\u2581"

_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
"""How a text is cut before its bytes are merged."""


def tokenizer_of(values: ModelSettings) -> JsonObject:
    """The content of tokenizer.json, of the metadata. Raises ModelError for a kind that is not known."""
    kind = values.get(f"{_PLACE}.model"), values.get(f"{_PLACE}.pre")
    make = _word_pieces if kind[0] == "bert" else _byte_pairs if kind == ("gpt2", "qwen2") else None
    if make is None:
        raise values.error(f"its tokenizer is {kind!r:.80}, which vecd reads from a tokenizer.json beside it alone")
    try:
        tokens, types = values[f"{_PLACE}.tokens"], values[f"{_PLACE}.token_type"]
        if make is _word_pieces:
            tokens = [_word_piece(token, each) for token, each in zip(tokens, types, strict=True)]
        added = {token: each for token, each in zip(tokens, types, strict=True) if each in (_CONTROL, _USER_DEFINED)}
        tokenizer = make(values, {token: index for index, token in enumerate(tokens)}, added.keys())
    except ModelError:
        raise
    except Exception as error:  # the library's errors have no other base
        raise values.error(f"{_PLACE} is not a vocabulary: {one_line(error)}") from None
    tokenizer.add_tokens(
        [AddedToken(token, special=each == _CONTROL, normalized=False) for token, each in added.items()]
    )
    content: JsonObject = json.loads(tokenizer.to_str())
    return content


def _word_piece(token: str, kind: int) -> str:
    """In the library "##" is before what goes on with a word; in the file a sign is before what begins one."""
    if kind == _CONTROL:
        return token
    if token.startswith(_WORD_BEGINS):
        return token[1:]
    return token if kind == _USER_DEFINED else f"##{token}"


def _word_pieces(values: ModelSettings, ids: dict[str, int], added: Set[str]) -> Tokenizer:
    """A vocabulary with no word in capital letters is of a model in lower case, one with no accents of a model that
    takes them off. Marks such as [PAD30522], which fill a table up, and <S> are no words."""
    words = [word for token in ids if token not in added and (word := token.removeprefix("##")).isalpha()]
    is_lower = all(word == word.lower() for word in words)
    has_accents = any(unicodedata.category(each) == "Mn" for each in unicodedata.normalize("NFD", "".join(words)))
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(strip_accents=is_lower and not has_accents, lowercase=is_lower)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    return tokenizer


def _byte_pairs(values: ModelSettings, ids: dict[str, int], added: Set[str]) -> Tokenizer:
    merges = [tuple(merge.split(" ")) for merge in values[f"{_PLACE}.merges"]]
    tokenizer = Tokenizer(models.BPE(ids, merges))
    tokenizer.normalizer = normalizers.NFC()
    cut = pre_tokenizers.Split(Regex(_QWEN2), "isolated")
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, by_bytes])
    if f"{_PLACE}.add_eos_token" not in values:  # of conversions from before June 2025, also of models that need it
        raise values.error(f"{_PLACE}.add_eos_token is missing: what ends a text is told by a tokenizer.json beside it")
    tokens = list(ids)
    begin, end = (
        [tokens[values[f"{_PLACE}.{side}_token_id"]]] if values.get(f"{_PLACE}.add_{side}_token") else []
        for side in ("bos", "eos")
    )
    if special := [(token, ids[token]) for token in (*begin, *end)]:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*begin, "$A", *end],
            pair=[*begin, "$A", *end, "$B:1", *(f"{token}:1" for token in end)],
            special_tokens=special,
        )
    return tokenizer
