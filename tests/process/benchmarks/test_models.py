import os
import signal
import time
from pathlib import Path

import pytest

from benchmarks import models
from benchmarks.requests import worker_pids
from benchmarks.servers import bundled_model
from benchmarks.several import ModelTable, learn_canaries, serving_all, write_config
from benchmarks.trials import Loads
from tests.support.models_trial import FLAGS, dummy_canaries


def test_a_load_is_counted_and_a_model_that_stays_is_not(tmp_path: Path) -> None:
    tables = [ModelTable(name, Path(bundled_model()), settings={"workers": 1}) for name in ("a", "b", "c")]
    with serving_all(tables[:2], tmp_path, *FLAGS) as server, Loads().watching(server) as loads:
        before = worker_pids(server, "a")
        assert not loads.pids
        write_config(tmp_path / "vecd.toml", tables)
        os.kill(server.session, signal.SIGHUP)
        deadline = time.monotonic() + 30
        while len(loads.pids) < 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.2)
        assert worker_pids(server, "a") == before
    assert len(loads.pids) == 1


def test_canaries_are_what_a_server_of_the_model_alone_answers(tmp_path: Path, minilm_folder: Path) -> None:
    [_, expected, _] = dummy_canaries(minilm_folder)
    found = learn_canaries(expected.table, expected.texts[:2], tmp_path, *FLAGS)
    assert [abs(one - other).max() < 1e-5 for one, other in zip(found.expected, expected.expected, strict=False)] == [
        True,
        True,
    ]


def test_a_part_that_cannot_be_measured_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert models.main(["--part", "one", "--results", str(tmp_path)]) == 1
    assert "no --against FOLDER" in capsys.readouterr().err
