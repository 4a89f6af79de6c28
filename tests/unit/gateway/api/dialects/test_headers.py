import pytest
from hypothesis import given
from hypothesis import strategies as st

from vecd.gateway.api.dialects.headers import MAX_TIMEOUT_MS, parse_accept, parse_priority, parse_timeout_s
from vecd.gateway.types.errors import BadRequest
from vecd.gateway.types.request import Encoding, Priority


@pytest.mark.parametrize(
    ("accept", "encoding"),
    [
        (None, None),
        ("", None),
        ("*/*", None),
        ("application/json", None),
        ("text/html", None),
        ("application/*", None),
        ("application/octet-stream", Encoding.BYTES),
        ("Application/Octet-Stream", Encoding.BYTES),
        ("application/x-npy", Encoding.NPY),
        ("application/x-npy;version=1", Encoding.NPY),
        ("application/octet-stream, */*;q=0.1", Encoding.BYTES),
        ("application/octet-stream, */*", None),
        ("application/octet-stream, application/json", None),
        ("application/octet-stream;q=0.5, application/json", None),
        ("application/octet-stream, application/json;q=0.9", Encoding.BYTES),
        ("application/octet-stream ; Q = 0.4 , application/json; q=0.3", Encoding.BYTES),
        ("application/octet-stream;q=0", None),
        ("application/octet-stream;q=0, */*", None),
        ("application/octet-stream;q=2", None),
        ("application/octet-stream;q=high", None),
        ("application/octet-stream;q=0.5, application/x-npy;q=0.6", Encoding.NPY),
        ("application/octet-stream, application/x-npy", Encoding.BYTES),
        ("application/x-npy;q=0.5, application/*;q=0.2", Encoding.NPY),
    ],
)
def test_accept(accept, encoding):
    assert parse_accept({} if accept is None else {"accept": accept}) is encoding


@given(st.text(st.sampled_from("application/octet-stream,;q=0.1* "), max_size=80))
def test_any_accept_is_read(accept):
    parse_accept({"accept": accept + ",application/x-npy"})


def test_priorities():
    assert parse_priority({}) is None
    assert parse_priority({"x-vecd-priority": "interactive"}) is Priority.INTERACTIVE
    assert parse_priority({"x-vecd-priority": "normal"}) is Priority.NORMAL
    assert parse_priority({"x-vecd-priority": "bulk"}) is Priority.BULK


@pytest.mark.parametrize("value", ["", "0", "Bulk", "bulk, bulk", "\xe9" * 1000])
def test_priorities_that_are_refused(value):
    with pytest.raises(
        BadRequest, match="header x-vecd-priority: must be 'interactive', 'normal' or 'bulk', is '"
    ) as caught:
        parse_priority({"x-vecd-priority": value})
    assert len(caught.value.message) < 250


@pytest.mark.parametrize(("value", "timeout_s"), [("1", 0.001), ("1500", 1.5), ("86400000", 86400.0), ("0010", 0.01)])
def test_timeouts(value, timeout_s):
    assert parse_timeout_s({"x-vecd-timeout-ms": value}) == timeout_s
    assert parse_timeout_s({}) is None


@pytest.mark.parametrize(
    "value", ["", "0", "-1", "1.5", "1e3", "86400001", "+1", " 1", "1_0", "\xb2", "9" * 5000, "1, 1", "None"]
)
def test_timeouts_that_are_refused(value):
    with pytest.raises(BadRequest, match=f"header x-vecd-timeout-ms: .* from 1 to {MAX_TIMEOUT_MS}, is '"):
        parse_timeout_s({"x-vecd-timeout-ms": value})
