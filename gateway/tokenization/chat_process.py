"""Gives conversations to the process that renders them with the model's chat template.

Owns that process (`vecd.gateway.tokenization.chat_template`): it is started for the first conversation, and again after
a conversation that took too long. Without conversations there is none.
"""

import asyncio
import signal
from dataclasses import asdict
from subprocess import DEVNULL

from vecd.base.files import JsonObject
from vecd.base.tasks import NoTasks
from vecd.gateway.config import ChatTemplateSpec
from vecd.gateway.errors import BadRequest, ServerError, Unavailable
from vecd.shm.control import readable
from vecd.shm.job import Job, JobDied

MAX_PAYLOAD_BYTES = 256 * 1024
"""Of the conversations of one request, as JSON."""
_REAP_S = 1.0


class ChatProcess:
    def __init__(self, spec: ChatTemplateSpec) -> None:
        self._spec = spec
        self.job: Job | None = None
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
        job, self.job = self.job, None
        if job is not None:
            job.kill()
            asyncio.get_running_loop().call_later(_REAP_S, job.process.poll)  # to wait would hold the loop up

    async def _ask(self, payload: bytes) -> JsonObject:
        order: JsonObject = {"request": payload.decode()}
        if self.job is None or self.job.process.poll() is not None:
            self.close()
            try:
                self.job = Job("render", stderr=DEVNULL)
            except NoTasks as error:
                raise Unavailable(f"The chat template cannot be rendered: {error}", retry_after_s=1) from None
            order |= asdict(self._spec)
        self.job.start(**order)
        await readable(self.job.channel.fileno())
        try:
            return dict(self.job.results())
        except JobDied as died:
            if died.status == -signal.SIGPROF:
                return {"error": "takes more than a second for the conversation"}
            raise ServerError("The process that renders the chat template has ended") from None
