"""How many of a run's requests differ."""

import pytest

from vecd.client.bench.options import parse_options


@pytest.mark.parametrize(
    ("flags", "num_requests"),
    [
        ("--clients 1,64", 512),
        ("--clients 2000", 4000),
        ("--rate 10", 2048),
        ("--rate 10 --max-connections 100", 512),
        ("--clients 64 --texts-per-request 2048", 128),
        ("--clients 1000 --texts-per-request 2048", 128),  # all their texts would be too many
        ("--clients 2000 --distinct-requests 7", 7),
    ],
)
def test_requests_that_are_in_progress_at_the_same_time_differ(flags, num_requests):
    options = parse_options(["--url", "http://127.0.0.1:1", *flags.split(), "--words", "1"])
    assert {len(load.requests) for load in options.loads} == {num_requests}


def test_bulk_requests_of_many_clients_differ_as_well():
    flags = "--clients 1 --bulk-clients 40 --bulk-texts 512"
    [load] = parse_options(["--url", "http://127.0.0.1:1", *flags.split()]).loads
    assert load.bulk is not None
    assert len(load.bulk.requests) == 80
