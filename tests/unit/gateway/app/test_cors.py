import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vecd.gateway.app.cors import Cors
from vecd.gateway.http.reader import encode_response
from vecd.gateway.request import HttpRequest, Response

ORIGIN = "https://a.example"
ASKED = "authorization,content-type,x-stainless-lang,x-stainless-retry-count"


def request(method: str = "POST", **headers: str) -> HttpRequest:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return HttpRequest(
        method=method, path="/", query=b"", headers=named, http_minor=1, keep_alive=True, request_id="id"
    )


def preflight(origin: str = ORIGIN, **headers: str) -> HttpRequest:
    return request("OPTIONS", origin=origin, access_control_request_method="POST", **headers)


def added(cors: Cors, asked: HttpRequest | None, response: Response | None = None) -> dict[str, str]:
    response = response or Response(200)
    before = dict(response.headers)
    cors.add_headers(response, asked)
    return {name: value for name, value in response.headers.items() if before.get(name) != value}


def test_off_unless_there_are_origins():
    cors = Cors(())
    assert added(cors, request(origin=ORIGIN)) == {}
    assert added(cors, None) == {}
    assert not cors.is_preflight(preflight())


@pytest.mark.parametrize(
    ("configured", "sent"),
    [
        ("HTTPS://A.example", "https://a.example"),
        ("https://a.example:443", "https://a.example"),
        ("http://localhost:80", "http://localhost"),
        ("http://[::1]:3000", "http://[::1]:3000"),
        ("app://obsidian.md", "app://obsidian.md"),
        ("null", "null"),
    ],
)
def test_an_origin_that_is_allowed_is_echoed(configured, sent):
    cors = Cors((configured, "https://other.example"))
    assert added(cors, request(origin=sent)) == {
        "access-control-allow-origin": sent,
        "access-control-expose-headers": "x-request-id, retry-after, retry-after-ms",
        "vary": "origin",
    }
    assert cors.is_preflight(preflight(sent))


@pytest.mark.parametrize(
    "sent",
    ["https://b.example", "http://a.example", "https://a.example:8443", "https://a.example.evil", "null", "*", "",
     "https://x.a.example", "https://A.example", "https://a.example, https://a.example", "https://a.example/", None],
)  # fmt: skip
def test_others_are_not(sent):
    cors = Cors((ORIGIN,))
    headers = {} if sent is None else {"origin": sent}
    assert added(cors, request(**headers)) == {"vary": "origin"}, "a cache must not give it to those allowed"
    assert not cors.is_preflight(request("OPTIONS", access_control_request_method="POST", **headers))
    assert not cors.is_preflight(request("OPTIONS", origin=ORIGIN))
    assert not cors.is_preflight(request("POST", origin=ORIGIN, access_control_request_method="POST"))


def test_any_origin():
    cors = Cors(("*",))
    assert added(cors, request()) == {}
    for sent in (ORIGIN, "null", "anything"):
        assert added(cors, request(origin=sent))["access-control-allow-origin"] == "*"
        assert "vary" not in added(cors, request(origin=sent))
        assert cors.is_preflight(preflight(sent))


def test_a_request_that_was_not_understood():
    assert added(Cors(("*",)), None)["access-control-allow-origin"] == "*"
    assert added(Cors((ORIGIN,)), None) == {"vary": "origin"}


def test_every_header_of_an_answer_can_be_read_and_what_it_varies_by_is_kept():
    shared = {"x-vecd-tokens": "1", "x-compute-time": "2", "retry-after": "3", "vary": "accept"}
    headers = added(Cors((ORIGIN,)), request(origin=ORIGIN), Response(200, headers=shared))
    exposed = "x-request-id, retry-after, retry-after-ms, x-vecd-tokens, x-compute-time"
    assert (headers["access-control-expose-headers"], headers["vary"]) == (exposed, "accept, origin")
    assert shared["vary"] == "accept", "headers that answers share are not written to"
    assert len(shared) == 4


def preflight_response(cors: Cors, asked: HttpRequest) -> Response:
    return asyncio.run(cors.respond_to_preflight(None, None, asked, None))


def test_a_preflight_allows_what_it_asks_for():
    asked = preflight(access_control_request_headers=ASKED)
    answer = preflight_response(Cors((ORIGIN,)), asked)
    assert (answer.status, answer.headers) == (
        204,
        {
            "access-control-allow-methods": "GET, HEAD, POST, OPTIONS",
            "access-control-allow-headers": ASKED,
            "access-control-max-age": "7200",
        },
    )
    assert "access-control-expose-headers" not in added(Cors((ORIGIN,)), asked, answer)


@pytest.mark.parametrize("headers", ["", "a b", "a,,b", "a: b", "\xe9"])
def test_a_preflight_that_asks_for_nothing_that_is_a_name(headers):
    answer = preflight_response(Cors((ORIGIN,)), preflight(access_control_request_headers=headers))
    assert answer.headers["access-control-allow-headers"] == "authorization, content-type"


@pytest.mark.parametrize(("value", "is_allowed"), [("true", True), ("false", False), (None, False)])
def test_a_page_may_reach_into_a_private_network_if_it_asks(value, is_allowed):
    asked = preflight() if value is None else preflight(access_control_request_private_network=value)
    headers = preflight_response(Cors((ORIGIN,)), asked).headers
    assert headers.get("access-control-allow-private-network") == ("true" if is_allowed else None)


# What llhttp lets pass as a value.
VALUES = st.text(st.characters(codec="latin-1", exclude_categories=["Cc"]), max_size=200)


@given(origin=VALUES, headers=VALUES, origins=st.sampled_from([("*",), (ORIGIN,), ("null", ORIGIN)]))
def test_no_value_can_split_an_answer_or_allow_more_than_it_names(origin, headers, origins):
    cors = Cors(origins)
    asked = preflight(origin, access_control_request_headers=headers)
    if not cors.is_preflight(asked):
        assert origin not in origins
        return
    answer = preflight_response(cors, asked)
    cors.add_headers(answer, asked)
    encode_response(answer, request_id="id", keep_alive=True)
    assert answer.headers["access-control-allow-origin"] in origins
