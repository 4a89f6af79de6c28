"""Renders conversations with the model's chat template, in a process of its own.

Owns the Jinja environment, which has what transformers gives a chat template, and the limits of a rendering. A template
is a program that may take any time and memory, so the kernel ends this process when a rendering has used its processor
time, and lets it have no more than its memory. A request is JSON:

    {"conversations", "kwargs", "continue_final_message"}

Source of what a template may use: transformers' documentation of chat templates, and `apply_chat_template`.
"""

import json
import resource
import signal
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from functools import cache, partial
from typing import Any, NoReturn

import orjson
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vecd.base.files import JsonObject
from vecd.shm.job import Report

MAX_CPU_S = 1.0
"""Of one rendering. Of templates that models have, the slowest takes milliseconds for the longest conversation."""
MAX_MEMORY_BYTES = 512 * 2**20
"""Of address space. 60 MB are used without a rendering."""
MAX_CHARS = 2**20
"""Of all texts of one reply: it is read on the event loop of the gateway, in 2 ms, and in 9 ms if all are emoji."""

_CONTINUED = "\ue000continued\ue000 "
"""At the end of a last message that is to be continued. Its blank shows whether the template strips messages."""
_PROBE = "\ue000probe\ue000"


class Refused(Exception):
    """The template cannot render the conversation. The message is for the client and quotes none of its texts."""


class ChatTemplate:
    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """`tokens`: the special tokens that a template may name, such as `eos_token`. Raises Refused."""

        def refuse(message: Any) -> NoReturn:
            # A message that the template has put together may quote a text.
            reason = f": {message[:500]}" if isinstance(message, str) and message and message in source else ""
            raise Refused(f"refuses the conversation{reason}")

        self._variables = {"tools": None, "documents": None, "add_generation_prompt": False, **tokens}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControls]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # Jinja's own writes HTML's escapes
        environment.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # of a template that was not checked
            raise Refused(f"cannot be compiled ({type(error).__name__})") from None
        self._takes_texts = _PROBE in self._probe(_PROBE)
        as_parts = self._probe([{"type": "text", "text": _PROBE}])
        self._takes_parts = _PROBE in as_parts and "'type'" not in as_parts

    def render(
        self, conversations: list[list[dict[str, Any]]], kwargs: Mapping[str, Any], *, continue_final_message: bool
    ) -> list[str]:
        """The text of each conversation. The content of a message is a text, or a list of at least one part. Raises
        Refused."""
        texts: list[str] = []
        for messages in conversations:
            texts.append(self._render(messages, kwargs, _CONTINUED if continue_final_message else ""))
            if sum(map(len, texts)) > MAX_CHARS:
                raise Refused(f"makes more than {MAX_CHARS} characters of the request")
        return texts

    def _render(self, messages: list[dict[str, Any]], kwargs: Mapping[str, Any], mark: str) -> str:
        """`mark`: put at the end of the last message; the text is cut there."""
        last = len(messages) - 1
        messages = [
            {**message, "content": self._content(message["content"], mark if index == last else "")}
            for index, message in enumerate(messages)
        ]
        try:
            text = self._template.render({**self._variables, **kwargs, "messages": messages})
            text.encode()  # raises for a lone surrogate, which no tokenizer takes
        except Refused:
            raise
        except MemoryError:
            raise Refused(f"needs more than {MAX_MEMORY_BYTES >> 20} MiB for the conversation") from None
        except Exception as error:  # a template may fail in any way
            raise Refused(f"fails on the conversation ({type(error).__name__})") from None
        if not mark:
            return text
        text, found, rest = text.rpartition(mark.strip())
        if not found:
            raise Refused("leaves out the end of the last message, so that it cannot be continued")
        return text if rest.startswith(" ") else text.rstrip()

    def _content(self, content: str | list[dict[str, Any]], end: str) -> str | list[dict[str, Any]]:
        """The content with `end` behind it, as the template takes it: a text, or a list of parts."""
        if isinstance(content, str):
            as_text = self._takes_texts or not self._takes_parts
            content = [{"type": "text", "text": content}]
        else:
            as_text = not self._takes_parts
        *parts, last = content
        parts.append({**last, "text": last["text"] + end})
        return "\n".join(part["text"] for part in parts) if as_text else parts

    def _probe(self, content: Any) -> str:
        """The text of a conversation with this content; empty if no text shows it. A reranker's template has roles of
        its own."""
        for roles in (("user",), ("query", "document")):
            messages = [{"role": role, "content": content} for role in roles]
            with suppress(Exception):  # a template may fail in any way
                text = self._template.render({**self._variables, "messages": messages})
                if _PROBE in text:
                    return text
        return ""


class _Generation(Extension):
    """`{% generation %}`, which marks a model's own words for training: they are rendered as any other."""

    tags = {"generation"}  # noqa: RUF012 (not a ClassVar in the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_given: JsonObject = {}


@cache
def _template() -> ChatTemplate:
    return ChatTemplate(**_given)


def work(report: Report, request: str, **template: Any) -> JsonObject:
    """The job "render". `template`: with the first order, what `ChatTemplate` is made of. It finds "texts", or an
    "error"."""
    _given.update(template)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # the kernel ends the process after it
    try:
        return {"texts": _template().render(**orjson.loads(request))}
    except Refused as error:
        return {"error": str(error)}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
