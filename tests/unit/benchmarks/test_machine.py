import platform

import pytest

from benchmarks.machine import processor_class


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"avx2", "avx512f", "avx512_bf16", "amx_tile", "amx_bf16"}, "AMX"),
        ({"avx2", "avx512f", "avx512_bf16", "avx512_vnni"}, "AVX512-BF16"),
        ({"avx2", "avx512f", "avx512_vnni"}, "AVX-512"),
        ({"avx", "avx2", "avx_vnni"}, "AVX2"),
        ({"asimd"}, platform.machine()),
    ],
)
def test_a_processors_class_is_the_best_of_its_instructions(flags: set[str], expected: str) -> None:
    assert processor_class(flags) == expected
