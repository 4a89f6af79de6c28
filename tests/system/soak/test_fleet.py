"""Whole nodes that are killed behind the proxies of deploy/: no request fails, and no vector is wrong.

In short, tests/system/fleet has the same.
"""

from pathlib import Path

import pytest

from tests.support.fleet import DUMMY, Envoy, FleetTraffic, HAProxy, Proxy, kill_in_turns, outcome, running_fleet
from tests.support.soak.form import only_long, record
from tests.support.soak.tenants import make_dummy_tenants
from tests.support.soak.traffic import under_traffic

pytestmark = only_long

NUM_NODES, NUM_CLIENTS = 3, 64
DURATION_S, INTERVAL_S = 60, 3


@pytest.mark.parametrize("make_proxy", [HAProxy, Envoy], ids=lambda proxy: proxy.NAME)
@pytest.mark.parametrize("ms_per_text", [1, 10])
def test_a_node_killed_every_three_seconds(make_proxy: type[Proxy], ms_per_text: int, minilm_folder: Path):
    """Clients repeat nothing. With 10 ms a text all of them wait in nodes; with 1 ms there are more requests."""

    texts = make_dummy_tenants(minilm_folder, 200)
    with running_fleet(make_proxy, NUM_NODES, *DUMMY, "--dummy-ms-per-text", str(ms_per_text)) as proxy:
        traffic, num_killed = under_traffic(
            proxy.url,
            texts,
            NUM_CLIENTS,
            lambda _: kill_in_turns(proxy, DURATION_S, INTERVAL_S),
            before=50,
            after=50,
            kind=FleetTraffic,
            max_texts=1,
        )
        figures = {"kills": num_killed, "repeated": proxy.num_repeated(), **outcome(traffic.tally)}
        record(f"{proxy.NAME}: nodes killed every {INTERVAL_S} s", clients=NUM_CLIENTS, nodes=NUM_NODES, **figures)
        traffic.tally.assert_all_right()
        assert num_killed >= DURATION_S / INTERVAL_S / 2
        assert proxy.num_repeated() > 0
