"""What is done to one model fails no request of another.

Every response is compared with what the dummy engine makes of its text.
"""

from pathlib import Path

import pytest

from benchmarks.trials import Trial
from tests.support.models_trial import FLAGS, assert_all_right, dummy_canaries


@pytest.fixture
def trial(tmp_path: Path, minilm_folder: Path) -> Trial:
    return Trial(
        canaries=dummy_canaries(minilm_folder),
        victim="second",
        num_clients=2,
        pause_s=0.01,
        settle_s=0.2,
        stretch_s=1.5,
        num_slices=1,
        folder=tmp_path,
        flags=FLAGS,
    )


def test_kills_reloads_and_unloads_of_one_model_fail_no_request(trial: Trial) -> None:
    stretches = trial.run({"killed": trial.kill, "reloaded": trial.reload, "unloaded": trial.unload})
    for name, [stretch] in stretches.items():
        assert name == "quiet" or stretch.num_done > 0, name
        assert_all_right([stretch])
