"""What stands around a text: a prompt, the tokenizer's special tokens, and the chat template of some models.

Owns how a `vecd.shm.heads.TextTemplate` and a prompt become special tokens, and a text before the text, so that one in
a chat template is then treated as any other. Called by `vecd.gateway.tokenization.tokenizer`.

    <|im_start|>system\\n p p <|im_end|>\\n<|im_start|>user\\n t t t <|im_end|> \\n
    └ tokenized with the text ────────────────────────────┘       └ suffix ───┘

What is too long is cut at the end of the text, and the suffix is kept. Source: `_restore_chat_template_suffix` of
sentence-transformers 6.
"""

import tokenizers

from vecd.gateway.tokenization.id_policy import NO_SPECIAL_TOKENS, SequenceTemplate
from vecd.gateway.types.errors import BadRequest
from vecd.shm.card import ModelError
from vecd.shm.heads import TextTemplate

_INSTRUCTION = "{instruction}"
_PLAIN = TextTemplate((("", ""), (_INSTRUCTION, "")), adds_special_tokens=True)


class TextFrame:
    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        own: SequenceTemplate,
        template: TextTemplate | None = None,
        folder: str = "",
    ) -> None:
        """`tokenizer` neither truncates nor pads yet. `own`: the special tokens that it adds. `folder`: has the
        template. Raises ModelError for one whose end may become one token with the end of a text."""
        self._tokenizer = tokenizer
        self._template = template or _PLAIN
        self._own = own if self._template.adds_special_tokens else NO_SPECIAL_TOKENS
        self.strips = self._template.strips
        if template is not None and (why := self._why_not()):
            raise ModelError(
                f"{folder}/sentence_bert_config.json: modality_config has 'message', by which texts are rendered by "
                f"the chat template: it {why}"
            )

    def _why_not(self) -> str:
        if self._tokenizer.encode_special_tokens:
            return "has special tokens, and --literal-special-tokens recognizes none"
        tokens = self._tokenizer.get_added_tokens_decoder().items()
        borders = {token_id for token_id, token in tokens if token.special and not token.lstrip}
        for _, after in self._template.variants:
            if after and self._ids(after)[0] not in borders:
                return f"has {after[:40]!r} behind a text, which does not begin with a special token"
        return ""

    def around(self, prompt: str) -> tuple[SequenceTemplate, str]:
        """The special tokens around a text with this prompt, which may be empty, and what is tokenized with the text,
        before it. Raises BadRequest for a prompt if there is no place for one."""
        variants = self._template.variants
        if prompt and len(variants) == 1:
            raise BadRequest(
                "The model's chat template has no place for a prompt: it renders no message with the role 'system'"
            )
        prompt = prompt.strip() if self._template.strips_prompt else prompt
        before, after = (part.replace(_INSTRUCTION, prompt) for part in variants[bool(prompt)])
        return SequenceTemplate(self._own.prefix, [*self._ids(after), *self._own.suffix]), before

    def whole(self, prompt: str) -> SequenceTemplate:
        """All tokens around an empty text."""
        (prefix, suffix), before = self.around(prompt)
        return SequenceTemplate([*prefix, *self._ids(before)], suffix)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids
