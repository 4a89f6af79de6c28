"""Available memory, from files laid out as the kernel's."""

from pathlib import Path

from vecd.workers.memory import available_mb

_MEMINFO = "MemTotal:       16384000 kB\nMemAvailable:    8192000 kB\n"


def root(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_less_of_the_machine_s_and_the_cgroup_s_counts(tmp_path: Path) -> None:
    proc = {"proc__meminfo": _MEMINFO, "proc__self__cgroup": "0::/vecd\n"}
    assert available_mb(root(tmp_path, **proc)) == 8000
    group = "sys__fs__cgroup__vecd__memory_DOT_"
    root(tmp_path, **{f"{group}max": str(1000 << 20), f"{group}current": str(900 << 20)})
    assert available_mb(tmp_path) == 100
    root(tmp_path, **{f"{group}stat": f"inactive_file {300 << 20}\n"})
    assert available_mb(tmp_path) == 400
    root(tmp_path, **{f"{group}current": str(1500 << 20)})
    assert available_mb(tmp_path) == 0


def test_without_files_none_is_known_to_be_there(tmp_path: Path) -> None:
    assert available_mb(tmp_path) == 0
