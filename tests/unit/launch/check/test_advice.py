"""What is recommended on machines that were imagined, from figures that were made up: each rule by itself."""

from dataclasses import replace
from typing import Any

import pytest

from vecd.launch.check.advice import advise, is_disturbed
from vecd.launch.check.report import Advice, Machine, Measurements, Path, Setting, Speed
from vecd.launch.config.num_gateways import GATEWAY_S_PER_REQUEST

MACHINE = Machine(
    processor="imagined",
    num_cores=2,
    num_usable_cores=2,
    num_usable_physical_cores=2,
    quota_cores=None,
    flags=("avx2",),
    memory_mb=16_000,
    available_mb=12_000,
    memory_limit_mb=None,
    gpus=(),
    kernel="6.1",
    python="3.11",
)
PROBES = {"probes": 15, "longest_probe_tokens": 256, "max_abs_diff": 1e-3, "min_cosine": 0.9991}
PATH = Path(
    path="fused",
    dtype="float32",
    device="cpu",
    attention="SDPA",
    reasons=(),
    refused=(),
    probes=PROBES,
    is_remembered=True,
    choosing_s=0.0,
    load_s=2.0,
    shared_mb=300,
)


def speed(
    dtype: str, tokens_per_s: float, *, batch_tokens: int = 2048, text_tokens: int = 24, private_mb: int = 40
) -> Speed:
    return Speed(dtype, "fused", text_tokens, batch_tokens, tokens_per_s, tokens_per_s, tokens_per_s, private_mb)


def measured(*speeds: Speed, scaling: dict[int, float] | None = None, **others: Any) -> Measurements:
    together = tuple(replace(speed("float32", rate), num_workers=count) for count, rate in (scaling or {}).items())
    others.setdefault("not_measured", {"bfloat16": "not native"})
    agreements = {"bfloat16": PROBES, "int8": {"min_cosine": 0.9931}}
    return Measurements(speeds, together, agreements=agreements, num_rounds=5, turn_s=0.5, **others)


def setting(advice: Advice, name: str) -> Setting:
    [found] = [setting for setting in advice.settings if setting.name == name]
    assert found.reason
    return found


def values(advice: Advice) -> dict[str, str | int]:
    return {setting.name: setting.value for setting in advice.settings}


def test_two_cores_without_bfloat16() -> None:
    advice = advise(MACHINE, {}, PATH, measured(speed("float32", 6000), scaling={1: 6000, 2: 11_000}))
    assert values(advice) == {"workers": 2, "dtype": "float32", "gateways": 1, "max_batch_tokens": 2048}
    assert "1.83 times" in setting(advice, "workers").reason
    assert "only type" in setting(advice, "dtype").reason


def test_one_core() -> None:
    machine = replace(MACHINE, num_usable_cores=1, num_usable_physical_cores=1)
    advice = advise(machine, {}, PATH, measured(speed("float32", 6000)))
    assert values(advice) == {"workers": 1, "dtype": "float32", "gateways": 1, "max_batch_tokens": 2048}
    assert setting(advice, "workers").reason == "one for the core"


@pytest.mark.parametrize(("dtype", "bfloat16_rate"), [("bfloat16", 6300), ("float32", 24_000)])
def test_the_format_is_the_one_that_is_served(dtype: str, bfloat16_rate: int) -> None:
    """Whatever was measured here: `vecd serve` has chosen by its own measurement."""
    why = "bfloat16 is 1.21 times as fast as float32 (1 x 12: 5.0 against 7.1 ms)"
    path = replace(PATH, dtype=dtype, reasons=("fused: …", f"{dtype}: {why}"))
    speeds = (speed("float32", 6000), speed("bfloat16", bfloat16_rate))
    advice = advise(MACHINE, {}, path, measured(*speeds, not_measured={}))
    assert setting(advice, "dtype").value == dtype
    assert setting(advice, "dtype").reason.startswith(why)
    assert ("0.99910" in setting(advice, "dtype").reason) is (dtype == "bfloat16")


def test_int8_is_never_chosen_for_anybody() -> None:
    advice = advise(MACHINE, {}, PATH, measured(speed("float32", 6000), speed("int8", 15_000)))
    assert setting(advice, "dtype").value == "float32"
    assert advice.notes == (
        "--dtype int8 has 2.50 times the tokens/s of float32 with less exact vectors (cosine 0.9931): yours to choose",
    )


def test_many_cores_leave_some_to_the_gateways() -> None:
    machine = replace(MACHINE, num_cores=64, num_usable_cores=64, num_usable_physical_cores=64, available_mb=200_000)
    path = replace(PATH, dtype="bfloat16")
    speeds = (speed("float32", 6000), speed("bfloat16", 24_000))
    advice = advise(machine, {}, path, measured(*speeds, scaling={1: 24_000, 64: 60 * 24_000}))
    workers, gateways = values(advice)["workers"], values(advice)["gateways"]
    share = 1000 * GATEWAY_S_PER_REQUEST  # of 24 tokens each, a worker computes 1,000 texts/s
    assert workers == 49 < 65 / (1 + share)
    assert int(workers) + int(int(workers) * share) <= 64
    assert gateways == 25
    assert "14.7" in setting(advice, "workers").reason
    assert "49,000 short texts/s" in setting(advice, "gateways").reason


def test_threads_of_a_core_are_measured_not_believed() -> None:
    machine = replace(MACHINE, num_cores=8, num_usable_cores=8, num_usable_physical_cores=4)
    no_gain = measured(speed("float32", 6000), scaling={1: 6000, 4: 23_000, 8: 23_500})
    assert setting(advise(machine, {}, PATH, no_gain), "workers").value == 4
    gain = measured(speed("float32", 6000), scaling={1: 6000, 4: 23_000, 8: 30_000})
    assert setting(advise(machine, {}, PATH, gain), "workers").value == 8
    unmeasured = advise(machine, {}, PATH, Measurements())
    assert setting(unmeasured, "workers").value == 4


def test_a_disturbed_measurement_decides_nothing_about_workers() -> None:
    one = replace(speed("float32", 3000), core_share=0.6)
    disturbed = Measurements((one,), (one, replace(one, tokens_per_s=2900, core_share=0.4, num_workers=2)))
    assert is_disturbed(disturbed)
    assert setting(advise(MACHINE, {}, PATH, disturbed), "workers").value == 2
    assert not is_disturbed(Measurements())


def test_memory_for_fewer_workers_than_cores() -> None:
    machine = replace(MACHINE, num_usable_cores=16, num_usable_physical_cores=16, available_mb=3000)
    advice = advise(machine, {}, PATH, measured(speed("float32", 2000, private_mb=300)))
    assert setting(advice, "workers").value == 6  # (0.8 × 3,000 - 300 - 300) / 300
    assert "memory for no more" in setting(advice, "workers").reason
    assert advice.notes == ()


def test_memory_for_no_worker() -> None:
    machine = replace(MACHINE, available_mb=500)
    advice = advise(machine, {}, PATH, measured(speed("float32", 2000, private_mb=300)))
    assert setting(advice, "workers").value == 1
    assert advice.notes == (
        "memory is short even for one worker: about 900 MB are needed, and 400 MB are 80% of what is available",
    )


def test_a_gpu() -> None:
    machine = replace(MACHINE, gpus=("H200", "H200"))
    path = replace(PATH, path="packed", dtype="bfloat16", device="cuda:0")
    advice = advise(machine, {}, path, measured(speed("bfloat16", 900_000, private_mb=0)))
    assert setting(advice, "workers").value == 2
    assert setting(advice, "dtype").value == "bfloat16"
    assert setting(advice, "max_batch_tokens").value == 32_768
    assert setting(advice, "gateways").value == 2  # 75,000 short texts/s would want 38, and there are two cores


@pytest.mark.parametrize(
    ("rates", "best"),
    [
        ({1500: 6000}, 2048),  # a quarter of a second ends before
        ({2048: 20_000}, 2048),
        ({2048: 20_000, 4096: 21_000}, 2048),
        ({2048: 40_000, 4096: 41_000, 8192: 50_000}, 8192),
        ({2048: 40_000, 4096: 48_000, 8192: 49_000}, 4096),
    ],
)
def test_larger_batches_only_where_they_are_clearly_faster(rates: dict[int, float], best: int) -> None:
    speeds = [speed("float32", rate, batch_tokens=size) for size, rate in rates.items()]
    assert setting(advise(MACHINE, {}, PATH, measured(*speeds)), "max_batch_tokens").value == best


def test_nothing_measured() -> None:
    advice = advise(MACHINE, {"model": "org/name"}, PATH, Measurements())
    assert values(advice) == {
        "model": "org/name",
        "workers": 2,
        "dtype": "float32",
        "gateways": 1,
        "max_batch_tokens": 2048,
    }
    assert "not measured" in setting(advice, "max_batch_tokens").reason
