"""`--gateways auto` over two starts: the first one measures, the next one knows."""

import sys

from tests.support.serving import Server, running_server

ON_FOUR_CORES = (
    sys.executable,
    "-c",
    "import sys, vecd.workers.processor as processor; processor.usable_cores = lambda: 4; "
    "from vecd.__main__ import main; sys.exit(main())",
)


def gateways(server: Server) -> list[int]:
    return [gateway["gateway"] for gateway in server.info()["gateways"]]


def test_the_second_start_has_the_gateways_that_the_speed_of_the_workers_needs(minilm_folder, tmp_path):
    flags = (
        str(minilm_folder),
        "--engine",
        "dummy",
        "--workers",
        "2",
        "--gateways",
        "auto",
        "--cache-dir",
        str(tmp_path),
    )
    with running_server(*flags, program=ON_FOUR_CORES) as server:
        assert gateways(server) == [0]
        assert "1 gateway (the speed of the workers is measured now" in server.stderr
        assert "reloaded" in server.reload_outcome()
        assert gateways(server) == [0], "a reload keeps the gateways that run"
    with running_server(*flags, program=ON_FOUR_CORES) as server:
        assert "2 gateways (half of 4 cores, for " in server.stderr
        assert gateways(server) == [0, 1]
        assert server.info()["cores"]["usable"] == 4
        assert len(server.embed(["a", "b"])) == 2
