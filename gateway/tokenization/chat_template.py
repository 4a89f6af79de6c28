"""Renders conversations with the model's chat template, in a process of its own.

Owns the Jinja environment, which has what transformers gives a chat template, and the limits of a rendering. A template
is a program, and a conversation its input: a few loops, or one multiplication of a string, take any time and memory. So
the kernel ends this process when a rendering has used its processor time, and lets it have no more than its memory. It
has no descriptors but its pipes. Started by `vecd.gateway.tokenization.chat_process`, which starts another one when it
is needed. Ends with its standard input.

    length (4 bytes, little-endian), JSON: {"source", "tokens"}                    the template
                                 ◄──────── {} or {"error"}                         it can be used, or not
    length, JSON: {"conversations", "kwargs", "continue_final_message"}            a request
                                 ◄──────── {"texts"} or {"error"}                  its reply

Source of what a template may use: transformers' documentation of chat templates, and `apply_chat_template`.
"""

import json
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, BinaryIO, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.ext import loopcontrols as LoopControls
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CPU_S = 1.0
"""Of one rendering. Of templates that models have, the slowest takes milliseconds for the longest conversation."""
MAX_MEMORY_BYTES = 512 * 2**20
"""Of address space. 60 MB are used without a rendering."""
MAX_CHARS = 2**20
"""Of all texts of one reply: it is parsed on the event loop of the gateway, in 1 ms."""

_CONTINUED = "\ue000continued\ue000 "
"""Marks the end of the last message, where the text is cut that is to be continued. Its blank shows whether the
template strips messages."""
_PROBE = "\ue000probe\ue000"


class Refused(Exception):
    """The template cannot render the conversation. The message is for the client and quotes none of its texts."""


class ChatTemplate:
    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """`tokens`: the special tokens that a template may name, such as `eos_token`.

        Raises jinja2.TemplateError for a template that cannot be compiled.
        """
        self._source = source
        self._variables = {"tools": None, "documents": None, "add_generation_prompt": False, **tokens}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControls]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
        self._template = environment.from_string(source)
        self._takes_texts = _PROBE in self._probe(_PROBE)
        as_parts = self._probe([{"type": "text", "text": _PROBE}])
        self._takes_parts = _PROBE in as_parts and "'type'" not in as_parts

    def render(
        self, conversations: list[list[dict[str, Any]]], kwargs: Mapping[str, Any], *, continue_final_message: bool
    ) -> list[str]:
        """The text of each conversation. The content of a message is a text, or a list of at least one part.
        `kwargs`: further variables of the template. Raises Refused."""
        texts: list[str] = []
        for messages in conversations:
            texts.append(self._render(messages, kwargs, continue_final_message))
            if sum(map(len, texts)) > MAX_CHARS:
                raise Refused(f"makes more than {MAX_CHARS} characters of the request")
        return texts

    def _render(self, messages: list[dict[str, Any]], kwargs: Mapping[str, Any], continue_final_message: bool) -> str:
        messages = [{**message, "content": self._content(message["content"])} for message in messages]
        if continue_final_message:
            _mark_end(messages[-1])
        try:
            text = self._template.render({**self._variables, **kwargs, "messages": messages})
        except _TemplateRefusal as error:
            # A message of the template alone; one that it has put together may quote a text.
            reason = f": {error.message}" if error.message and error.message in self._source else ""
            raise Refused(f"refuses the conversation{reason}") from None
        except MemoryError:
            raise Refused(f"needs more than {MAX_MEMORY_BYTES >> 20} MiB for the conversation") from None
        except Exception as error:  # a template may fail in any way
            raise Refused(f"fails on the conversation ({type(error).__name__})") from None
        if not continue_final_message:
            return text
        text, mark, rest = text.rpartition(_CONTINUED.strip())
        if not mark:
            raise Refused("leaves out the end of the last message, so that it cannot be continued")
        return text if rest.startswith(" ") else text.rstrip()

    def _content(self, content: Any) -> Any:
        """The content as the template takes it: a text, or a list of parts."""
        if isinstance(content, str):
            return content if self._takes_texts or not self._takes_parts else [{"type": "text", "text": content}]
        if self._takes_parts:
            return content
        return "\n".join(part["text"] for part in content)

    def _probe(self, content: Any) -> str:
        try:
            return self._template.render({**self._variables, "messages": [{"role": "user", "content": content}]})
        except Exception:  # a template may fail in any way
            return ""


class _TemplateRefusal(jinja2.TemplateError):
    """Raised by a template itself."""


class _Generation(Extension):
    """`{% generation %}`, which marks a model's own words for training: they are rendered as any other."""

    tags = {"generation"}  # noqa: RUF012 (not a ClassVar in the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: Any) -> NoReturn:
    raise _TemplateRefusal(str(message)[:500])


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Without HTML's escapes, which Jinja's own filter writes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _mark_end(message: dict[str, Any]) -> None:
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + _CONTINUED
    else:
        message["content"] = [*content[:-1], {**content[-1], "text": content[-1]["text"] + _CONTINUED}]


# --- the process ------------------------------------------------------------------------------------------------


def _read(pipe: BinaryIO) -> Any:
    """The next frame; None at the end."""
    head = pipe.read(4)
    return json.loads(pipe.read(int.from_bytes(head, "little"))) if len(head) == 4 else None


def _reply(make: Callable[[], dict[str, Any]]) -> None:
    """Write what `make` returns. The kernel ends the process if that takes too much processor time."""
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    try:
        reply = json.dumps(make()).encode()
    except Refused as error:
        reply = json.dumps({"error": str(error)}).encode()
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.buffer.write(len(reply).to_bytes(4, "little") + reply)
    sys.stdout.buffer.flush()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    pipe = sys.stdin.buffer
    given = _read(pipe)
    templates: list[ChatTemplate] = []

    def load() -> dict[str, Any]:
        try:
            templates.append(ChatTemplate(given["source"], given["tokens"]))
        except Exception as error:  # of a template that nobody has checked
            raise Refused(f"cannot be compiled ({type(error).__name__})") from None
        return {}

    _reply(load)
    while templates and (request := _read(pipe)) is not None:
        _reply(lambda: {"texts": templates[0].render(**request)})


if __name__ == "__main__":
    main()
