from pathlib import Path

from benchmarks.ours import worker_config
from benchmarks.servers import bundled_model
from vecd.shm.card import read_card


def test_the_configuration_is_one_that_workers_take(tmp_path: Path) -> None:
    config = worker_config(read_card(Path(bundled_model())), "bfloat16", tmp_path)
    assert (config.dtype, config.num_threads, config.device) == ("bfloat16", 1, "cpu")
    assert type(config).from_json(config.to_json()) == config
