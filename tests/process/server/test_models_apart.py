"""What is done to one model fails no request of another: the short form of tests/system/soak/test_models.py.

Every response is compared with what the dummy engine makes of its text.
"""

from pathlib import Path

import pytest

from benchmarks.trials import Trial, load_once
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


def test_kills_and_reloads_of_one_model_fail_no_request(trial: Trial) -> None:
    stretches = trial.run({"killed": trial.kill, "reloaded": trial.reload})
    assert {name: min(one.num_done for one in of) > 0 for name, of in stretches.items() if name != "quiet"} == {
        "killed": True,
        "reloaded": True,
    }
    for of in stretches.values():
        assert_all_right(of)


def test_a_model_that_is_unloaded_and_loaded_again_fails_no_request(trial: Trial) -> None:
    stretches = trial.run({"unloaded": trial.unload})
    assert stretches["unloaded"][0].num_done > 0
    assert_all_right([*stretches["quiet"], *stretches["unloaded"]])


def test_many_requests_at_once_load_a_model_once(trial: Trial) -> None:
    assert load_once(trial.canaries[0], 100, trial.folder, *trial.flags) == 1
