from pathlib import Path

import pytest

from benchmarks.cpu import await_asleep
from benchmarks.inprocess import InProcess
from benchmarks.servers import bundled_model


def test_a_peer_takes_its_turns_in_a_process_of_its_own_and_sleeps_between_them() -> None:
    with InProcess("sentence-transformers", Path(bundled_model())) as peer:
        assert peer.choose(12) == "modules on token ids"
        passes = peer.turn(12, warmup_s=0.0, turn_s=0.0)
        assert len(passes) == 1
        assert 0 < passes[0] < 60
        assert await_asleep([peer.session], timeout_s=60) < 60


def test_a_peer_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="sentence-transformers's process has ended"):
        InProcess("sentence-transformers", tmp_path)
