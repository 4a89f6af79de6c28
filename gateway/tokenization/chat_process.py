"""Gives conversations to the process that renders them with the model's chat template.

Owns that process (`vecd.gateway.tokenization.chat_template`): it is started for the first conversation, and again after
a conversation that took too long. Without conversations there is none. Called by `vecd.gateway.pipeline`.
"""

import asyncio
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from typing import Any

import orjson

from vecd.gateway.types.config import ChatTemplateSpec
from vecd.gateway.types.errors import ApiError, BadRequest, ServerError, Unavailable

MAX_PAYLOAD_BYTES = 256 * 1024
"""Of the conversations of one request, as JSON."""

_TIMEOUT_S = 10.0
"""For a reply: the process gets 1 s of processor time for it, and machines may be busy."""


class ChatProcess:
    def __init__(self, spec: ChatTemplateSpec) -> None:
        self._command = spec.command
        self._template = orjson.dumps({"source": spec.source, "tokens": spec.tokens})
        self._process: Process | None = None
        self._lock = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        """Of the process; None if there is none."""
        return None if self._process is None else self._process.pid

    async def render(self, payload: bytes) -> list[str]:
        """The texts of a request's conversations. `payload`: a request as the process reads it.

        Raises BadRequest, which names `messages`, for conversations that the template refuses, or that take it too much
        time or memory, Unavailable when the process does not reply, and ServerError when it ends by itself.
        """
        async with self._lock:
            try:
                reply = await asyncio.wait_for(self._ask(payload), _TIMEOUT_S)
            except (asyncio.IncompleteReadError, ConnectionError, RuntimeError):  # the last: uvloop's for a closed pipe
                raise await self._why_it_ended() from None
            except TimeoutError:
                self.close()
                raise Unavailable("The chat template was not rendered in time", retry_after_s=1) from None
            except BaseException:  # cancelled: the reply would be taken for the next request's
                self.close()
                raise
        if "error" in reply:
            raise _refusal(reply["error"])
        texts: list[str] = reply["texts"]
        return texts

    def close(self) -> None:
        """Kill the process, if there is one. The next request starts another."""
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()

    async def _why_it_ended(self) -> ApiError:
        """The error for a process that has closed its pipes. Waits for its exit status first: asyncio loses that of a
        process that is killed when it has ended already."""
        assert self._process is not None
        try:
            status = await asyncio.wait_for(self._process.wait(), _TIMEOUT_S)
        finally:
            self.close()
        if status == -signal.SIGPROF:
            return _refusal("takes more than a second for the conversation")
        return ServerError("The process that renders the chat template has ended")

    async def _ask(self, payload: bytes) -> dict[str, Any]:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True
            )
            loaded = await _exchange(self._process, self._template)
            if "error" in loaded:
                self.close()
                return loaded
        return await _exchange(self._process, payload)


async def _exchange(process: Process, frame: bytes) -> dict[str, Any]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(len(frame).to_bytes(4, "little") + frame)
    await process.stdin.drain()
    num_bytes = int.from_bytes(await process.stdout.readexactly(4), "little")
    reply: dict[str, Any] = orjson.loads(await process.stdout.readexactly(num_bytes))
    return reply


def _refusal(why: str) -> BadRequest:
    return BadRequest(f"'messages': the model's chat template {why}", param="messages")
