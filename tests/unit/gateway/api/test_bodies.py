import asyncio
import gzip
import random
import threading
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import orjson
import pytest

from tests.support.asking import PLAIN
from vecd.gateway.api import body as bodies_module
from vecd.gateway.api import large_json
from vecd.gateway.api.body import Bodies
from vecd.gateway.api.large_json import Bounds, FieldNames
from vecd.gateway.api.operation import Call, ParsedEmbed, ParsedMessages
from vecd.gateway.dialects.openai import FIELDS, parse_embeddings
from vecd.gateway.errors import BadRequest, PayloadTooLarge, TooManyRequests
from vecd.gateway.http.framing import zstd
from vecd.gateway.request import Coding
from vecd.gateway.tokenization.fair_pool import Threads

LARGE = FieldNames(frozenset({"input"}), FIELDS.small)


@asynccontextmanager
async def parsing(max_body_bytes: int = 10**9, max_inputs: int = 100_000) -> AsyncIterator[tuple[Bodies, Threads]]:
    threads, bodies = Threads(), Bodies()
    bodies.max_bytes, bodies.bounds = max_body_bytes, Bounds(max_inputs, max_chars=10**9, max_ids=10**9)
    try:
        yield bodies, threads
    finally:
        threads.close()


def parse(
    body: bytes,
    parse_fields: Callable[[dict[str, Any]], Any] = dict,
    coding: Coding | None = None,
    bare_list: str = "",
    **limits: int,
) -> Any:
    async def main() -> Any:
        async with parsing(**limits) as (bodies, threads):
            return await bodies.parse(body, LARGE._replace(bare_list=bare_list), parse_fields, threads, coding=coding)

    return asyncio.run(main())


@pytest.mark.parametrize("num_texts", [1, 20_000])
def test_small_and_large_bodies_are_the_same_and_large_ones_are_parsed_in_a_thread(num_texts):
    fields = {"input": [f"text {i}" for i in range(num_texts)], "model": "m", "other": [None, {"a": 1.5}]}
    found, thread = parse(orjson.dumps(fields), lambda found: (dict(found), threading.current_thread()))
    assert found == fields
    assert (thread is threading.main_thread()) is (num_texts == 1)


@pytest.mark.parametrize("num_texts", [1, 20_000])
@pytest.mark.parametrize("coding", [None, Coding.GZIP])
def test_a_bare_list_is_the_field_that_it_is_taken_for(num_texts, coding):
    texts = [f"text {i}" for i in range(num_texts)]
    body = b" \n" + orjson.dumps(texts)
    sent = body if coding is None else gzip.compress(body)
    assert parse(sent, coding=coding, bare_list="input") == {"input": texts}
    with pytest.raises(BadRequest, match="must be a JSON object"):
        parse(sent, coding=coding)
    assert parse(b'{"input":["a"]}', bare_list="input") == {"input": ["a"]}


@pytest.mark.parametrize("padding", [b"", b" " * 100_000])
@pytest.mark.parametrize(
    ("body", "says", "at"),
    [
        (b'["a"', "(char|near byte) {at}", 4),
        (b'["a"],"other":1', "unexpected content after document.*(char|near byte) {at}", 5),
        (b'["\xff"]', "byte 0xff at offset {at} is not UTF-8", 2),
        (b'["a","\\ud800"]', r"'input\[1\]' is not text: half of a surrogate pair", 0),
    ],
)
def test_a_fault_of_a_bare_list_is_told_at_its_place(padding, body, says, at):
    with pytest.raises(BadRequest, match=says.format(at=len(padding) + at)):
        parse(padding + body, bare_list="input")


async def test_a_body_that_came_before_a_reload_is_read_as_far_as_the_models_of_then_need_it():
    body = gzip.compress(b'{"input":"%b"}' % (b"x" * 200_000))
    async with parsing() as (bodies, threads):
        parsing_of_before = asyncio.ensure_future(bodies.parse(body, LARGE, dict, threads, coding=Coding.GZIP))
        await asyncio.sleep(0)
        bodies.bounds = Bounds(max_items=1, max_chars=10, max_ids=1)
        assert len((await parsing_of_before)["input"]) == 200_000


async def test_bodies_that_wait_to_be_parsed_are_bounded_and_those_of_one_tenant_take_half(monkeypatch):
    monkeypatch.setattr("vecd.gateway.api.body.MAX_WAITING_BYTES", 300_000)
    body = b'{"input":"%b"}' % (b"x" * 100_000)
    async with parsing() as (bodies, threads):

        async def parse_for(tenant: str, sent: bytes = body) -> int:
            return len((await bodies.parse(sent, LARGE, dict, threads, tenant))["input"])

        first = asyncio.ensure_future(parse_for("a"))
        await asyncio.sleep(0)
        with pytest.raises(TooManyRequests, match=r"100012 of them yours, .* and 150000 of one caller") as caught:
            await parse_for("a")
        assert int(caught.value.headers["retry-after"]) >= 1
        second = asyncio.ensure_future(parse_for("b"))
        await asyncio.sleep(0)
        with pytest.raises(TooManyRequests, match=r"^bodies of 200024 bytes .* this request has 100012 .* most 300000"):
            await parse_for("c")
        assert await parse_for("c", b'{"input":"small"}') == len("small")
        assert {await first, await second} == {100_000}
        assert await parse_for("a") == 100_000
        assert (bodies.room.num, dict(bodies.room.num_of)) == (0, {})


PADDING = b" " * 100_000
SURROGATE, DEEP = b'"\\ud800 secret"', b"[" * 1000 + b'"secret"' + b"]" * 1000


@pytest.mark.parametrize("padding", [b"", PADDING], ids=["small", "large"])
@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "is not valid JSON|must be a JSON object"),
        (b'{"input":"secret"}{}', "is not valid JSON"),
        (b'{"input":"secret"}\x00', "is not valid JSON"),
        (b'{"input":%b}' % SURROGATE, "^'input' is not text: half of a surrogate pair"),
        (b'{"input":["a",{"text":%b}]}' % SURROGATE, r"^'input\[1\]' is not text"),
        (b'{"input":["\\ud83d\\ude00 secret","\\ud83d"]}', r"^'input\[1\]' is not text"),
        (b'{"user":%b}' % SURROGATE, "^'user' is not text"),
        (b'{"secret":%b}' % SURROGATE, "^a field is not text"),
        (b'{%b:1}' % SURROGATE, "^a field is not text"),
        (b'{"\xff":1}', "is not valid JSON"),
        (b'{"input":NaN}', "is not valid JSON"),
        (b'{"input":"secret', "is not valid JSON"),
        (b"null", "must be a JSON object"),
        (b'[{"input":"secret"}]', "must be a JSON object"),
        (b"1e999", "is not valid JSON|must be a JSON object"),
        (b'{"input":' + b"[" * 1025 + b"]" * 1025 + b"}", "is not valid JSON"),
    ],
)  # fmt: skip
def test_hostile_bodies_are_refused_and_not_quoted(padding, body, says):
    for padded in (padding + body, body + padding):
        with pytest.raises(BadRequest, match=says) as caught:
            parse(padded)
        assert "secret" not in caught.value.message


@pytest.mark.parametrize("num_texts", [1, 20_000])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"caf\xe9", "byte 0xe9 at offset {at} is not UTF-8; the text may be Latin-1 or Windows-1252: send UTF-8"),
        (b"\xc4\xe3", "byte 0xc4 at offset {at} is not UTF-8"),
        (
            b"\xed\xa0\xbd",
            "byte 0xed at offset {at} is not UTF-8; a surrogate is written there, which UTF-8 does not have",
        ),
    ],
)
def test_the_byte_that_is_not_utf8_is_named(num_texts, text, says):
    before = b'{"input":[%b"' % (b'"text",' * (num_texts - 1))
    body = b'%b%b"]}' % (before, text)
    at = body.index(next(bytes([byte]) for byte in text if byte > 127))
    with pytest.raises(BadRequest) as caught:
        parse(body)
    assert caught.value.message == f"The body is not valid JSON: {says.format(at=at)}"


@pytest.mark.parametrize("num_before", [0, 1, 9_999, 20_000])
@pytest.mark.parametrize(
    "item", [b'"\\ud83d"', b'"\\ud83d\\ud83d"', b'"\\ude00"', b'{"text":"\\ud83d"}', b'["\\ude00"]']
)
def test_the_input_with_half_a_character_is_named(num_before, item):
    body = b'{"input":[%b%b%b]}' % (b'"text",' * num_before, item, b',"text"' * (20_000 - num_before))
    with pytest.raises(BadRequest) as caught:
        parse(body)
    message = "is not text: half of a surrogate pair (\\ud800 to \\udfff) is in it without the other half"
    assert (caught.value.message, caught.value.param) == (f"'input[{num_before}]' {message}", "input")


def test_half_a_character_is_found_in_few_steps():
    with mock.patch.object(large_json, "run_end", wraps=large_json.run_end) as run_end:
        for num_before in (21_000, 90_000):
            run_end.reset_mock()
            with pytest.raises(BadRequest, match=rf"'input\[{num_before}\]' is not text"):
                parse(b'{"input":[%b"\\ud800"]}' % (b"[]," * num_before))
            assert run_end.call_count < 60


@pytest.mark.parametrize("num_texts", [1, 20_000])
@pytest.mark.parametrize(
    ("encode", "says"),
    [
        (gzip.compress, "byte 0x8b at offset 1 is not UTF-8; it begins like gzip: name that in the header Content-Enc"),
        (zstd.compress, "byte 0xb5 at offset 1 is not UTF-8; it begins like zstd: name"),
        (zlib.compress, "byte 0x9c at offset 1 is not UTF-8; it begins like deflate: name"),
        (lambda body: body.decode().encode("utf-16"), "byte 0xff at offset 0 is not UTF-8; it begins like UTF-16"),
        (lambda body: body.decode().encode("utf-32-le"), "; it begins like UTF-32"),
        (lambda body: b"\xef\xbb\xbf" + body, "; it begins with a byte order mark: leave that out"),
    ],
)  # fmt: skip
def test_a_body_in_another_encoding_is_told_which_it_may_be(num_texts, encode, says):
    random.seed(0)
    body = orjson.dumps({"input": [random.randbytes(40).hex() for _ in range(num_texts)]})
    with pytest.raises(BadRequest, match=r"^The body is not valid JSON: ") as caught:
        parse(encode(body))
    assert says in caught.value.message


@pytest.mark.parametrize("padding", [b"", PADDING], ids=["small", "large"])
@pytest.mark.parametrize(
    ("value", "param", "says"),
    [
        (b"9" * 100, "input", "'input' must be a string"),
        (b"[%b]" % (b"9" * 100), "input", r"'input\[0\]' must be a string, is a number with a fraction, or too large"),
        (DEEP, "input", r"'input\[0\]\[0\]' must be a token id, is a list"),
        (b"[[]]", "input", "is an empty list"),
        (b'"x","input":["secret",1]', "input", r"'input\[1\]' must be a string"),
        (b'"x","dimensions":1e400', None, "is not valid JSON"),
        (b'"x","dimensions":%b' % (b"9" * 100), "dimensions", "must be a whole number"),
        (b'"x","model":["secret"]', "model", "must be a string, is a list"),
    ],
)
def test_values_that_fit_no_field_are_refused_by_name(padding, value, param, says):
    def parse_fields(fields: dict[str, Any]) -> ParsedEmbed | ParsedMessages:
        return parse_embeddings(Call(FIELDS.read(fields), {}, PLAIN))

    body = b'{"input":%b}' % value
    for padded in (padding + body, body + padding):
        with pytest.raises(BadRequest, match=says) as caught:
            parse(padded, parse_fields)
        assert caught.value.param == param
        assert "secret" not in caught.value.message
        assert "999" not in caught.value.message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unit", "says"),
    [
        (b',"%d":1', "has more than 16384 fields"),
        (b',"":1', "has more than 16384 fields"),
        (b',"input":""', "has more than 16384 fields"),
        (b',"input":[[]]', "has more than 16384 fields"),
        (b',"user":"%b"' % (b"secret" * 100_000), "'user': .* 262144 bytes in all"),
        (b',"model":"%b"' % (b"secret" * 100_000), "'model': .* 262144 bytes in all"),
        (b',"secret":%b' % (b"1" * 1_000_000), "^other fields and the names of fields: .* 262144 bytes in all"),
        (b',"%b":1' % (b"secret" * 100_000), "the names of fields: .* 262144 bytes in all"),
    ],
)  # fmt: skip
def test_what_a_body_is_filled_up_with_is_refused(unit, says):
    units = (unit % index if b"%d" in unit else unit for index in range(20_000 if len(unit) < 100 else 1))
    with pytest.raises(BadRequest, match=says) as caught:
        parse(b'{"input":"x"' + b"".join(units) + b"}")
    assert "secret" not in caught.value.message


def test_no_small_body_has_more_fields_than_a_large_one_may():
    """Else the same object would be taken or refused by its size."""
    assert bodies_module.INLINE_BYTES // len(b'"":1,') < Bounds(max_items=1, max_chars=1, max_ids=1).max_fields


# --- sent compressed ----------------------------------------------------------------------------------------------

COMPRESS: dict[Coding, Callable[[bytes], bytes]] = {
    Coding.GZIP: gzip.compress,
    Coding.DEFLATE: zlib.compress,
    Coding.ZSTD: zstd.compress,
}


def test_a_small_body_that_becomes_large_is_parsed_in_a_thread():
    for num_texts, is_inline in ((20_000, False), (1, True)):
        body = gzip.compress(orjson.dumps({"input": ["text"] * num_texts}))
        assert len(body) < 1000
        thread = parse(body, lambda fields: threading.current_thread(), Coding.GZIP)
        assert (thread is threading.main_thread()) is is_inline


@pytest.mark.parametrize("coding", Coding)
@pytest.mark.parametrize("num_texts", [1, 20_000])
def test_a_compressed_body_means_what_it_was_before_and_is_bounded_by_that(coding, num_texts):
    body = orjson.dumps({"input": [f"text {i}" for i in range(num_texts)]})
    assert parse(COMPRESS[coding](body), coding=coding, max_body_bytes=len(body)) == parse(body)
    with pytest.raises(PayloadTooLarge, match=f"longer than the {len(body) - 1} bytes allowed"):
        parse(COMPRESS[coding](body), coding=coding, max_body_bytes=len(body) - 1)


@pytest.mark.parametrize("coding", Coding)
def test_a_compressed_body_becomes_no_more_than_64_times_as_long_or_4_mib(coding):
    num_bytes = 4 * 1024 * 1024
    assert parse(COMPRESS[coding](b"{}" + b" " * (num_bytes - 2)), coding=coding) == {}
    with pytest.raises(PayloadTooLarge, match=rf"than the {num_bytes} bytes allowed, once its \d+ bytes are decompr"):
        parse(COMPRESS[coding](b"{}" + b" " * num_bytes), coding=coding)
    long = b'{"input":"%b"}' % random.Random(0).randbytes(100_000).hex().encode()
    assert parse(COMPRESS[coding](long + b" " * 6_000_000), coding=coding)["input"] == long[10:-2].decode()
    with pytest.raises(PayloadTooLarge, match="bytes allowed, once its"):
        parse(COMPRESS[coding](long + b" " * 12_000_000), coding=coding)


@pytest.mark.parametrize("num_bytes", [0, 1_000_000])
def test_what_is_not_of_its_coding_is_refused_and_not_quoted(num_bytes):
    with pytest.raises(BadRequest, match="not valid gzip data") as caught:
        parse(b'{"input":"secret"}' + b" " * num_bytes, coding=Coding.GZIP)
    assert "secret" not in caught.value.message
    with pytest.raises(BadRequest, match=r"is not valid JSON|must be a JSON object"):
        parse(gzip.compress(b"secret" + b" " * num_bytes), coding=Coding.GZIP)


async def test_what_bodies_become_is_bounded_together_while_they_become_it(monkeypatch):
    monkeypatch.setattr("vecd.gateway.api.body.MAX_WAITING_BYTES", 30_000_000)
    monkeypatch.setattr("vecd.gateway.api.body.INFLATED_AT_A_TIME_BYTES", 100_000)
    monkeypatch.setattr("vecd.gateway.api.body.MAX_INFLATED_RATIO", 2000)
    bomb = gzip.compress(b'{"input":"%b"}' % (b"x" * 20_000_000))
    most = 0
    async with parsing() as (bodies, threads):

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, bodies.room.num)
                await asyncio.sleep(0)

        watching = asyncio.ensure_future(watch())
        three = [bodies.parse(bomb, LARGE, dict, threads, coding=Coding.GZIP) for _ in range(3)]
        ends = await asyncio.gather(*three, return_exceptions=True)
        assert sorted(map(type, ends), key=str) == [dict, TooManyRequests, TooManyRequests]
        assert most <= 30_000_000
        assert (bodies.room.num, dict(bodies.room.num_of)) == (0, {})
        left = asyncio.ensure_future(bodies.parse(bomb, LARGE, dict, threads, coding=Coding.GZIP))
        while not bodies.room.num:
            await asyncio.sleep(0)
        left.cancel()
        await asyncio.wait([left])
        assert left.cancelled()
        assert bodies.room.num == 0
        watching.cancel()
