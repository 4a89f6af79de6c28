"""The process of the chat template: what a hostile template, or a caller who leaves, does to it."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest

from vecd.base import programs
from vecd.gateway.config import ChatTemplateSpec
from vecd.gateway.errors import BadRequest, ServerError
from vecd.gateway.tokenization.chat_process import ChatProcess

FINE = "{{ messages[0].content }}"
ON_REQUEST = "{% if messages[0].content == 'evil' %}EVIL{% endif %}{{ messages[0].content }}"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def payload(content: str) -> bytes:
    conversations = [[{"role": "user", "content": content}]]
    return orjson.dumps({"conversations": conversations, "kwargs": {}, "continue_final_message": False})


@asynccontextmanager
async def chat_process(source: str) -> AsyncIterator[ChatProcess]:
    chat = ChatProcess(ChatTemplateSpec(source, {}))
    try:
        yield chat
    finally:
        job = chat.job
        chat.close()
        if job is not None:
            job.process.wait(30)


@pytest.mark.parametrize(
    ("evil", "says"),
    [
        (LOOP, "takes more than a second"),
        ("{{ 10 ** (10 ** (9 + messages | length)) }}", "takes more than a second"),
        ("{{ 'x' * 10 ** (9 + messages | length) }}", "needs more than 512 MiB"),
        ("{{ 'x' | center(10 ** (9 + messages | length)) }}", "needs more than 512 MiB"),
        # On a slow machine the memory is not filled within the time.
        ("{% set ns = namespace(s='xx') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
         "needs more than 512 MiB|takes more than a second"),
        ("{{ 'x' * 2 ** (20 + messages | length) }}", "makes more than 1048576 characters"),
        ("{{ '\\ud800' }}", r"fails on the conversation \(UnicodeEncodeError\)"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"fails on the conversation \(RecursionError\)"),
    ],
)  # fmt: skip
async def test_a_template_that_takes_all_time_or_memory_harms_its_own_request_alone(evil, says):
    async with chat_process(ON_REQUEST.replace("EVIL", evil)) as chat:
        for _ in range(2):
            assert await chat.render(payload("a")) == ["a"]
            with pytest.raises(BadRequest, match=says) as caught:
                await chat.render(payload("evil"))
            assert caught.value.param == "messages"
        assert await chat.render(payload("b")) == ["b"]


@pytest.mark.parametrize(("source", "says"), [("{% if %}", "cannot be compiled"), (LOOP, "takes more than a second")])
async def test_a_template_that_cannot_be_used_is_said_of_every_request(source, says):
    async with chat_process(source) as chat:
        for _ in range(2):
            with pytest.raises(BadRequest, match=says):
                await chat.render(payload("a"))


async def test_the_longest_texts_arrive_whole() -> None:
    async with chat_process("{{ '\\x01' * 2 ** 20 }}") as chat:
        assert await chat.render(payload("a")) == ["\x01" * 2**20]


async def test_a_caller_who_leaves_takes_no_other_callers_reply() -> None:
    async with chat_process(ON_REQUEST.replace("EVIL", LOOP)) as chat:
        leaving = asyncio.ensure_future(chat.render(payload("evil")))
        waiting = asyncio.ensure_future(chat.render(payload("a")))
        while (job := chat.job) is None:
            await asyncio.sleep(0.01)
        leaving.cancel()
        assert await asyncio.wait_for(waiting, 30) == ["a"]
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert job.process.wait(30) == -signal.SIGKILL


async def test_a_process_that_ended_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with chat_process(ON_REQUEST.replace("EVIL", LOOP)) as chat:
        assert await chat.render(payload("a")) == ["a"]
        for is_ours in (True, False):  # killed by us, or by somebody else
            job = chat.job
            assert job is not None
            (chat.close if is_ours else job.process.kill)()
            job.process.wait(30)
            assert await chat.render(payload("b")) == ["b"]
            assert chat.job is not job
        killed, rendering = chat.job, asyncio.ensure_future(chat.render(payload("evil")))
        assert killed is not None
        await asyncio.sleep(0.1)
        killed.process.kill()
        with pytest.raises(ServerError):
            await rendering
        assert await chat.render(payload("d")) == ["d"]
    monkeypatch.setattr(programs, "self_command", lambda kind: ["/bin/false"])
    async with chat_process(FINE) as gone:
        with pytest.raises(ServerError):
            await gone.render(payload("a"))


async def test_one_that_is_given_up_is_reaped_and_the_loop_does_not_wait_for_it() -> None:
    async with chat_process(FINE) as chat:
        assert await chat.render(payload("a")) == ["a"]
        job = chat.job
        assert job is not None
        chat.close()
        async with asyncio.timeout(30):
            while job.process.returncode is None:
                await asyncio.sleep(0.05)
