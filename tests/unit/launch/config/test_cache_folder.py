from pathlib import Path

import pytest

from vecd.launch.config.settings import load_settings


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        (["--cache-dir", "/tmp/c"], {"CACHE_DIRECTORY": "/var/cache/vecd"}, "/tmp/c"),
        ([], {"CACHE_DIRECTORY": "/var/cache/vecd"}, "/var/cache/vecd"),
        ([], {"CACHE_DIRECTORY": "/var/cache/a:/var/cache/b"}, "/var/cache/a"),
        ([], {"XDG_CACHE_HOME": "/home/u/.c"}, "/home/u/.c/vecd"),
        ([], {"XDG_CACHE_HOME": "relative"}, str(Path.home() / ".cache" / "vecd")),
        ([], {}, str(Path.home() / ".cache" / "vecd")),
    ],
)
def test_the_folder_is_named_by_flag_then_service_then_user(flags, environ, expected, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("VECD_CACHE_DIR", "VECD_MODEL", "CACHE_DIRECTORY", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert load_settings(flags).cache_folder == Path(expected)
