"""Gives conversations to the process that renders them with the model's chat template.

Owns that process (`vecd.gateway.tokenization.chat_template`): it is started for the first conversation, and again after
a conversation that took too long. Without conversations there is none.
"""

import asyncio
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from contextlib import suppress
from typing import Any

import orjson

from vecd.base.tasks import NoTasks, naming_limit
from vecd.gateway.config import ChatTemplateSpec
from vecd.gateway.errors import BadRequest, ServerError, Unavailable

MAX_PAYLOAD_BYTES = 256 * 1024
"""Of the conversations of one request, as JSON."""

_MAX_REPLY_BYTES = 8 * 2**20
"""A reply has at most 2**20 characters, of at most 6 bytes each in JSON."""


class ChatProcess:
    def __init__(self, spec: ChatTemplateSpec) -> None:
        self._command = spec.command
        self._template = orjson.dumps({"source": spec.source, "tokens": spec.tokens})
        self.process: Process | None = None
        self._lock = asyncio.Lock()

    async def render(self, payload: bytes) -> list[str]:
        """The texts of a request's conversations. `payload`: a request as the process reads it. The caller has a
        deadline, and cancels. Raises BadRequest for conversations that the template refuses, or that take it too much
        time or memory, and ServerError when the process ends by itself."""
        async with self._lock:
            try:
                reply = await self._ask(payload)
            except BaseException:  # cancelled: the reply would be taken for the next request's
                self.close()
                raise
        if "error" in reply:
            raise BadRequest(f"'messages': the model's chat template {reply['error']}", param="messages")
        texts: list[str] = reply["texts"]
        return texts

    def close(self) -> None:
        """The next request starts another process."""
        process, self.process = self.process, None
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()

    async def _ask(self, payload: bytes) -> dict[str, Any]:
        lines = [payload]
        if self.process is None or self.process.returncode is not None:
            lines.insert(0, self._template)
            try:
                with naming_limit():
                    self.process = await asyncio.create_subprocess_exec(
                        *self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True,
                        limit=_MAX_REPLY_BYTES,
                    )  # fmt: skip
            except NoTasks as error:
                raise Unavailable(f"The chat template cannot be rendered: {error}", retry_after_s=1) from None
        process = self.process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(ConnectionError, RuntimeError):  # it has ended; the latter is uvloop's for a closed pipe
            process.stdin.writelines(line + b"\n" for line in lines)
            await process.stdin.drain()
        reply = await process.stdout.readline()
        if reply.endswith(b"\n"):
            parsed: dict[str, Any] = orjson.loads(reply)
            return parsed
        # Before it is killed: asyncio loses the exit status of a process that has ended already.
        if await process.wait() == -signal.SIGPROF:
            return {"error": "takes more than a second for the conversation"}
        raise ServerError("The process that renders the chat template has ended")
