import numpy as np
import pytest

from benchmarks.vectors import WrongVectors, require_same

OURS = np.array([[1.0, 0.0], [0.6, 0.8]], np.float32)


def test_the_same_direction_is_enough() -> None:
    require_same(OURS, OURS * 3)
    require_same(OURS, OURS + np.float32(0.001))


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (OURS[::-1], "cosine 0.6000"),
        (np.zeros_like(OURS), "cosine nan"),
        (np.ones((2, 3), np.float32), "3 dimensions instead of 2"),
    ],
)
def test_others_are_refused(theirs: np.ndarray, message: str) -> None:
    with np.errstate(invalid="ignore"), pytest.raises(WrongVectors, match=message):
        require_same(OURS, theirs)
