import asyncio
import threading
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from gateway.bodies import Bodies
from gateway.errors import BadRequest, TooManyRequests
from gateway.threads import Threads

LARGE = frozenset({"input"})


def parse(body: bytes, parse_fields: Callable[[dict[str, Any]], Any] = dict) -> Any:
    async def main() -> Any:
        threads = Threads()
        try:
            return await Bodies(threads, max_inputs=100_000, max_chars=10**9, max_ids=10**9).parse(
                body, LARGE, parse_fields
            )
        finally:
            threads.close()

    return asyncio.run(main())


@pytest.mark.parametrize("num_texts", [1, 20_000])
def test_small_and_large_bodies_are_the_same(num_texts):
    fields = {"input": [f"text {i}" for i in range(num_texts)], "model": "m", "other": [None, {"a": 1.5}]}
    assert parse(orjson.dumps(fields)) == fields


@pytest.mark.parametrize(("num_texts", "is_inline"), [(1, True), (20_000, False)])
def test_fields_of_large_bodies_are_parsed_in_a_thread(num_texts, is_inline):
    body = orjson.dumps({"input": ["text"] * num_texts})
    thread = parse(body, lambda fields: threading.current_thread())
    assert (thread is threading.main_thread()) is is_inline


@pytest.mark.parametrize("padding", [b"", b" " * 100_000])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "is not valid JSON|must be a JSON object"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b"{", "is not valid JSON"),
        (b'{"input":"secret', "is not valid JSON"),
        (b'{"input":"\\ud800"}', "is not valid JSON"),
        (b'{"input":"\xff"}', "is not valid JSON"),
        (b'{"input":NaN}', "is not valid JSON"),
        (b'{"input":' + b"[" * 5000, "is not valid JSON"),
    ],
)
def test_what_is_not_a_json_object_is_refused_and_not_quoted(padding, body, says):
    with pytest.raises(BadRequest, match=says) as caught:
        parse(padding + body)
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("num_texts", [1, 20_000])
def test_what_the_dialect_refuses_is_refused(num_texts):
    def refuse(fields: dict[str, Any]) -> None:
        raise BadRequest("as asked", param="input")

    with pytest.raises(BadRequest, match="as asked"):
        parse(orjson.dumps({"input": ["text"] * num_texts}), refuse)


def test_bodies_that_wait_to_be_parsed_are_bounded(monkeypatch):
    monkeypatch.setattr("gateway.bodies._MAX_WAITING_BYTES", 150_000)
    body = b'{"input":"%b"}' % (b"x" * 100_000)

    async def main() -> None:
        threads = Threads()
        bodies = Bodies(threads, max_inputs=10, max_chars=10**9, max_ids=10**9)
        try:
            first = asyncio.ensure_future(bodies.parse(body, LARGE, dict))
            await asyncio.sleep(0)
            with pytest.raises(TooManyRequests, match=r"100012 bytes wait .* this one has 100012, at most 150000"):
                await bodies.parse(body, LARGE, dict)
            assert await bodies.parse(b'{"input":"small"}', LARGE, dict) == {"input": "small"}
            await first
            assert len((await bodies.parse(body, LARGE, dict))["input"]) == 100_000
        finally:
            threads.close()

    asyncio.run(main())
