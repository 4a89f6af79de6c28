"""`vecd.gateway.http.forwarded`: who is believed, and whom the headers name."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vecd.gateway.http.forwarded import TrustedProxies, client_of

PROXIES = TrustedProxies("10.0.0.0/8, 192.168.1.1,2001:db8:aaaa::/48, ::1, ::ffff:172.16.0.0/108,unix")
PEER = "10.0.0.2"
CALLER = "203.0.113.9"


def caller(**headers: str) -> str:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return PROXIES.caller_of(named, PEER).client


WALKS = [
    # what the header says, and who it makes the caller
    ("203.0.113.9", CALLER),
    (" 203.0.113.9\t", CALLER),
    ("1.1.1.1, 203.0.113.9, 10.1.2.3", CALLER),
    ("1.1.1.1,203.0.113.9,192.168.1.1,10.1.2.3", CALLER),
    ("1.1.1.1, 203.0.113.9, 172.16.5.5", CALLER),
    ("203.0.113.9:50123", CALLER),
    ("203.0.113.9:_hidden", CALLER),
    ("::ffff:203.0.113.9", CALLER),
    ("[::ffff:203.0.113.9]:80", CALLER),
    ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
    ("[2001:db8:1:2::9]:4711", "2001:db8:1:2::/64"),
    ("203.0.113.9, 2001:db8:aaaa::7", CALLER),
    # all are trusted: the leftmost
    ("10.9.9.9, 10.1.2.3", "10.9.9.9"),
    # what is no address ends the walk
    ("unknown", PEER),
    ("", PEER),
    ("203.0.113.9,", PEER),
    ("203.0.113.9, unknown, 10.1.2.3", "10.1.2.3"),
    ("203.0.113.9, , 10.1.2.3", "10.1.2.3"),
    ("203.0.113.9, 10.1.2.3.4", PEER),
    ("203.0.113.09", PEER),
    ("203.0.113", PEER),
    ("3405803785", PEER),
    ("203.0.113.9:123456", PEER),
    ("203.0.113.9:", PEER),
    ("[203.0.113.9", PEER),
    ("[2001:db8::1]x", PEER),
    ("[2001:db8::1%eth0]", PEER),
    ("2001:db8:::1", PEER),
    ("203.0.113.9 10.1.2.3", PEER),
    ("٢٠٣.0.113.9", PEER),
    ("203.0.113.9\0", PEER),
]  # fmt: skip


@pytest.mark.parametrize(("value", "named"), WALKS)
def test_x_forwarded_for_is_read_from_the_right_up_to_the_first_untrusted_address(value, named):
    assert caller(x_forwarded_for=value) == named


FORWARDED = [
    ("for=203.0.113.9", CALLER),
    ('for="203.0.113.9"', CALLER),
    ('for="203.0.113.9:50123";by=10.0.0.2', CALLER),
    ("by=1.1.1.1; for=203.0.113.9 ;host=a", CALLER),
    ("for=1.1.1.1, for=203.0.113.9, for=10.1.2.3;by=10.0.0.2", CALLER),
    ('for=203.0.113.9, For="[2001:db8:aaaa::7]:4711"', CALLER),
    ('for="203.0.\\113.9"', CALLER),
    ('host="a,for=1.1.1.1";for=203.0.113.9', CALLER),
    ('for=203.0.113.9;host="a\\",for=1.1.1.1;x=\\"b"', CALLER),
    ('for=203.0.113.9;host="a\\\\"', CALLER),
    # what a client wrote to the left, with a quote that nothing closes
    ('for=1.1.1.1;by=", for=203.0.113.9', CALLER),
    ('for=1.1.1.1;by=", for="203.0.113.9"', CALLER),
    ('for="1.1.1.1, for=203.0.113.9, for="10.1.2.3"', CALLER),
    ("for=unknown", PEER),
    ("by=203.0.113.9", PEER),
    ("for", PEER),
    ("", PEER),
    ("for=203.0.113.9,", PEER),
    ("for=203.0.113.9;for=1.1.1.1", PEER),
    ("for=203.0.113.9 for=1.1.1.1", PEER),
    ('for="203.0.113.9', PEER),
    ('for=203.0.113.9"', PEER),
    ("for=203.0.113.9;;by=a", PEER),
    ("203.0.113.9", PEER),
    ("for=203.0.113.9, for=unknown, for=10.1.2.3", "10.1.2.3"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "named"), FORWARDED)
def test_forwarded_is_read_in_the_same_way(value, named):
    assert caller(forwarded=value) == named


@pytest.mark.parametrize(
    ("x_forwarded_for", "forwarded", "named"),
    [
        ("203.0.113.9", 'for="203.0.113.9:80"', CALLER),
        ("203.0.113.9", "for=203.0.113.8", PEER),
        ("203.0.113.9", "for=10.1.2.3", PEER),
        ("203.0.113.9", "for=unknown", PEER),
        ("2001:db8:1:2::1", 'for="[2001:db8:1:2::2]"', "2001:db8:1:2::/64"),
    ],
)
def test_both_headers_must_name_one_caller(x_forwarded_for, forwarded, named):
    assert caller(x_forwarded_for=x_forwarded_for, forwarded=forwarded) == named


def test_a_trusted_peer_without_headers_is_the_caller():
    assert PROXIES.caller_of({"host": "a"}, PEER) == (PEER, "")
    assert PROXIES.caller_of({}, "") == ("", "")


@pytest.mark.parametrize(
    ("headers", "scheme"),
    [
        ({"x-forwarded-for": CALLER, "x-forwarded-proto": "https"}, "https"),
        ({"x-forwarded-proto": "HTTP"}, "http"),
        ({"x-forwarded-proto": "https, http"}, ""),
        ({"forwarded": f"for={CALLER};proto=https"}, "https"),
        ({"forwarded": f"for=1.1.1.1;proto=ftp, for={CALLER};proto=https, for=10.1.2.3;proto=http"}, "https"),
        ({"forwarded": f"for={CALLER};proto=gopher"}, ""),
        ({"forwarded": f"for={CALLER}", "x-forwarded-proto": "https"}, ""),
        ({"forwarded": f"for={CALLER};proto=https", "x-forwarded-for": "1.1.1.1"}, ""),
    ],
)
def test_the_scheme_is_the_one_of_the_caller(headers, scheme):
    assert PROXIES.caller_of(headers, PEER).scheme == scheme


def test_only_so_many_trusted_hops_are_read():
    assert caller(x_forwarded_for=CALLER + ", 10.1.2.3" * 31) == CALLER
    assert caller(x_forwarded_for=CALLER + ", 10.1.2.3" * 32) == "10.1.2.3"


LONG = ['"' * 31_000, '"' + "\\" * 31_000 + '"', '\\"' * 15_500, "," * 31_000, "for=1.1.1.1;" * 2_600, "1" * 31_000]


@pytest.mark.parametrize("written", LONG, ids=lambda written: written[:3])
def test_of_a_long_header_the_end_is_read(written):
    for name, ours in (("x_forwarded_for", CALLER), ("forwarded", f"for={CALLER}")):
        assert caller(**{name: written}) == PEER
        assert caller(**{name: f"{written}, {ours}"}) == CALLER


def test_an_entry_of_which_only_a_part_is_read_is_no_address():
    """At most 2 KiB are: it is work on the event loop, before any key is looked at."""
    entry, end = f"1{CALLER}", ", 10.1.2.3"
    for num_read in range(1, len(entry)):
        value = entry + " " * (2048 - num_read - len(end)) + end
        assert caller(x_forwarded_for=value) == "10.1.2.3", "not 203.0.113.9, 03.0.113.9, …"


@pytest.mark.parametrize(
    ("peername", "is_trusted"),
    [
        (("10.1.2.3", 1), True),
        (("::ffff:10.1.2.3", 1, 0, 0), True),
        (("::ffff:172.16.1.1", 1, 0, 0), True),
        (("172.16.1.1", 1), True),
        (("172.32.1.1", 1), False),
        (("2001:db8:aaaa:1::", 1, 0, 0), True),
        (("2001:db8:aaab::", 1, 0, 0), False),
        (("::1", 1, 0, 0), True),
        (("::a00:1", 1, 0, 0), False),
        ("", True),
        ("/run/a.sock", True),
        (None, False),
        (("", 0), False),
    ],
)
def test_which_peers_are_trusted(peername, is_trusted):
    assert PROXIES.trusts(peername) is is_trusted


def test_unix_is_trusted_only_if_it_is_named():
    assert not TrustedProxies("10.0.0.1").trusts("")
    assert TrustedProxies("unix").trusts("")
    assert not TrustedProxies("unix").trusts(("10.0.0.1", 1))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("10.0.0.1,proxy.local", "'proxy.local' is not a proxy: an address as 10.0.0.2"),
        ("10.0.0.0/33", "'10.0.0.0/33' is not a proxy"),
        ("010.0.0.1", "'010.0.0.1' is not a proxy"),
        ("*", "'*' is not a proxy"),
        ("0.0.0.0/0", "'0.0.0.0/0' is every address"),
        ("::/0", "'::/0' is every address"),
        ("::ffff:0:0/96", "'::ffff:0:0/96' is every address"),
        ("::ffff:0.0.0.0/96", "'::ffff:0.0.0.0/96' is every address"),
        ("10.0.0.1/8", "'10.0.0.1/8' has bits behind the network's prefix: 10.0.0.0/8"),
        ("2001:db8::1/64", "'2001:db8::1/64' has bits behind the network's prefix: 2001:db8::/64"),
    ],
)
def test_a_name_that_is_no_proxy_is_refused(names, message):
    with pytest.raises(ValueError, match=r".*") as caught:
        TrustedProxies(names)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("peername", "client"),
    [(("fe80::1:2%eth0", 5, 0, 2), "fe80::/64"), ("", ""), ("/run/socket", ""), (b"\0abstract", ""), (None, "")],
)
def test_who_is_at_the_other_end(peername, client):
    assert client_of(peername) == client


@given(st.ip_addresses())
def test_addresses_are_named_as_the_standard_library_names_them(address):
    mapped = getattr(address, "ipv4_mapped", None)
    expected = address if mapped is None else mapped
    name = str(expected) if expected.version == 4 else f"{ipaddress.ip_network((int(expected) >> 64 << 64, 64))}"
    assert client_of((str(address), 1)) == name
    text = str(address) if address.version == 4 else f"[{address}]"
    assert PROXIES.caller_of({"x-forwarded-for": text}, PEER).client == name
    assert PROXIES.caller_of({"forwarded": f'for="{text}"'}, PEER).client == name


@given(st.text(st.characters(max_codepoint=255), max_size=60), st.sampled_from(["x-forwarded-for", "forwarded"]))
def test_whatever_a_client_writes_before_it_the_entry_of_a_trusted_proxy_counts(written, header):
    ours = {"x-forwarded-for": CALLER, "forwarded": f'for="{CALLER}:80"'}[header]
    assert PROXIES.caller_of({header: f"{written}, {ours}"}, PEER).client == CALLER


@given(st.text(st.characters(max_codepoint=255) | st.sampled_from('",;=\\[]:. for10'), max_size=80))
def test_no_header_fails(value):
    for name in ("x-forwarded-for", "forwarded", "x-forwarded-proto"):
        PROXIES.caller_of({name: value}, PEER)
