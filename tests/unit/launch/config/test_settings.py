from pathlib import Path

import pytest

from vecd.base.failures import ConfigurationError
from vecd.launch.config.settings import RETIRED_FLAGS, flag_table, load_settings
from vecd.shm.settings import read_memory_budget


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(argv)
    return caught.value.problems


def test_flag_over_environment_over_dotenv_over_file_over_default(monkeypatch, tmp_path):
    sources = ["port", "max_inputs", "max_requests", "max_batch_tokens"]
    (tmp_path / "c.toml").write_text("".join(f"{name.replace('_', '-')} = 1111\n" for name in sources))
    (tmp_path / ".env").write_text("".join(f"VECD_{name.upper()}=2222\n" for name in sources[:3]) + "OTHER=1\n")
    for name in sources[:2]:
        monkeypatch.setenv(f"VECD_{name.upper()}", "3333")
    settings = load_settings(["--config", "c.toml", "--port", "4444"])
    assert [getattr(settings, name) for name in sources] == [4444, 3333, 2222, 1111]


def test_every_problem_is_told_at_once_with_its_source_and_value(monkeypatch, tmp_path):
    (tmp_path / "c.toml").write_text("max-inputs = 'many'\nno-such = 1\n")
    (tmp_path / ".env").write_text("VECD_DTYPE=float8\n")
    monkeypatch.setenv("VECD_PORT", "70000")
    monkeypatch.setenv("VECD_NO_SUCH", "1")
    told = "\n".join(problems("--config", "c.toml", "--workers", "0", "--bogus", "--device", "tpu"))
    for part in (
        "unrecognized arguments: --bogus",
        "c.toml: no_such",
        "VECD_NO_SUCH",
        "c.toml: max_inputs",
        "'many'",
        ".env: VECD_DTYPE",
        "'float8'",
        "VECD_PORT",
        "must be a whole number from 0 to 65535 (given: '70000')",
        "--workers",
        "(given: '0')",
        "--device",
        "'tpu'",
    ):
        assert part in told


def test_a_key_is_never_shown_and_never_empty(monkeypatch, tmp_path):
    monkeypatch.setenv("VECD_API_KEY", "s3cret")
    assert "s3cret" not in repr(load_settings([]))
    for value, problem in (("  ", "must not be blank"), ("", "is empty; give it a key, or remove it")):
        monkeypatch.setenv("VECD_API_KEY", value)
        assert problems() == [f"VECD_API_KEY: {problem}"]
    monkeypatch.delenv("VECD_API_KEY")
    (tmp_path / ".env").write_text("VECD_API_KEY=\n")
    assert problems() == [".env: VECD_API_KEY: is empty; give it a key, or remove it"]


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ("--workers 1025", "--workers: must be 'auto', or a whole number from 1 to 1024 (given: '1025')"),
        ("--max-inputs 1.5", "--max-inputs: must be a whole number from 1 to 100000 (given: '1.5')"),
        ("--max-wait 0", "--max-wait: must be a number of seconds above 0 and at most 86400 (given: '0')"),
        ("--device tpu", "--device: must be 'auto', 'cpu' or 'cuda' (given: 'tpu')"),
        ("--api-key=", "--api-key: must not be blank"),
        ("--ready-fd 999", "--ready-fd: is not an open file descriptor (given: '999')"),
        ("--port", "--port: expected one argument"),
        ("--model org/m", "unrecognized arguments: --model; --model: MODEL is positional: vecd serve MODEL"),
        (
            "--model-id=org/m",
            "unrecognized arguments: --model-id=org/m; --model-id: MODEL is positional: vecd serve MODEL",
        ),
        ("--wrokers 2", "unrecognized arguments: --wrokers; --wrokers: did you mean --workers?"),
        ("--cors-origins *,https://a.example", "no other beside it"),
        ("--trusted-proxies 10.0.0.1,proxy.local,10.0.0.1/8", "--trusted-proxies: 'proxy.local' is not a proxy: an"),
        ("--otlp-endpoint localhost:4318", "is not the URL of a collector"),
        ("--otlp-endpoint http://localhost:70000", "is not the URL of a collector"),
        ("--otlp-endpoint http://me:secret@localhost:4318", "must not have a password in it"),
        ("--config missing.toml", "missing.toml"),
    ],
)
def test_a_problem_is_a_sentence(argv, problem):
    [told] = problems(*argv.split())
    assert problem in told
    assert "secret" not in told
    assert len(problems("--gateways", "0", *argv.split())) == 2, "it hides no other problem"


def test_a_misspelt_line_of_dotenv_is_told(tmp_path):
    (tmp_path / ".env").write_text("VECD_PROT=1\nOTHER=2\n")
    assert problems() == [".env: VECD_PROT: there is no such setting; did you mean VECD_PORT?"]


@pytest.mark.parametrize(
    ("flag", "names"),
    [
        *(
            ("--cors-origins", names)
            for names in (
                "", "*", "http://localhost:3000, app://obsidian.md,null", "http://[::1]:8080",
                "HTTPS://A.example:443", "http://127.0.0.1,", "https://xn--bcher-kva.example",
            )
        ),
        *(("--trusted-proxies", names) for names in ("", "10.0.0.0/8, unix,2001:db8::/32", "::1")),
        *(("--otlp-endpoint", url) for url in ("https://collector.example/otlp", "http://[::1]:4318/v1/traces")),
    ],
)  # fmt: skip
def test_lists_of_names_and_addresses(flag, names):
    assert getattr(load_settings([flag, names]), flag[2:].replace("-", "_")) == names


@pytest.mark.parametrize("words", RETIRED_FLAGS)
def test_what_was_retired_says_what_serves(words, monkeypatch):
    flag, _, value = words.partition(" ")
    [given] = problems(*words.split())
    monkeypatch.setenv(f"VECD_{flag[2:].replace('-', '_').upper()}", value or "1")
    [in_environment] = problems()
    assert given.startswith(f"{flag}: must be" if value else f"unrecognized arguments: {flag}")
    instead = RETIRED_FLAGS[words]
    assert given.endswith(f"(given: {value!r}); {instead}" if value else f"; {flag}: {instead}")
    assert in_environment.endswith(f"(given: {value!r}); {instead}" if value else f"; {instead}")


def test_lines_of_dotenv_that_cannot_be_parsed_are_named_once_and_not_quoted(tmp_path, capfd):
    lines = [
        "",
        "",
        'VECD_API_KEY "a-key-of-a-good-length"',
        "A B",
        "VECD_PORT=1",
        "",
        "= c",
        "X='open",
        "export VECD_HOST",
    ]
    (tmp_path / ".env").write_text("\n".join(lines))
    assert problems() == [".env: line 3: is not NAME=VALUE"]
    assert capfd.readouterr().err.splitlines() == [
        f"vecd: warning: .env: line {number}: is not NAME=VALUE, and is ignored" for number in (4, 7, 8)
    ]


def test_the_lines_of_dotenv_around_one_that_is_ignored_count(tmp_path, capfd):
    (tmp_path / ".env").write_text("VECD_PORT=81\nA B\nVECD_WORKERS=3\n")
    settings = load_settings([])
    assert (settings.port, settings.workers) == (81, 3)
    assert capfd.readouterr().err == "vecd: warning: .env: line 2: is not NAME=VALUE, and is ignored\n"


def test_a_dotenv_that_is_no_text_is_told(tmp_path):
    (tmp_path / ".env").write_bytes("VECD_MODEL=caf\u00e9".encode("latin-1"))
    assert problems() == [".env: cannot be read: it is not UTF-8"]


@pytest.mark.parametrize(
    ("flags", "ignored", "used"),
    [
        (["--uds", "/s"], "VECD_PORT", "--uds"),
        (["--admin-uds", "/s", "--admin-port", "81"], "--admin-port", "--admin-uds"),
    ],
)
def test_a_port_beside_a_unix_socket_is_told_as_it_was_set(flags, ignored, used, monkeypatch, capfd):
    monkeypatch.setenv("VECD_PORT", "81")
    load_settings([])
    assert capfd.readouterr().err == ""
    load_settings(flags)
    assert capfd.readouterr().err == f"vecd: warning: {ignored} is ignored, because {used} is given\n"


@pytest.mark.parametrize(
    "origin",
    [
        "https://a.example/", "https://a.example/path", "a.example", "localhost:3000", "//a.example", "https://",
        "https://*.example", "https://a.example:x", "https://a.example:70000", "https://u:p@a.example", "https://a b",
        "https://bücher.example", "https://a.example?q", "NULL", "file:///", "**", "http://::1",
    ],
)  # fmt: skip
def test_what_is_no_origin_is_told(origin):
    [problem] = problems("--cors-origins", f"https://b.example,{origin}")
    assert "--cors-origins" in problem
    assert f"{origin!r} is not an origin" in problem


def test_kubernetes_service_links_are_not_settings(monkeypatch):
    monkeypatch.setenv("VECD_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("VECD_PORT_8000_TCP", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("VECD_SERVICE_HOST", "10.0.0.1")
    assert load_settings([]).port == 8000


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as caught:
        load_settings(["--help-all"])
    assert not caught.value.code
    help_text = capsys.readouterr().out
    for line in flag_table().splitlines()[3:]:
        assert line.split("`")[1] in help_text


def test_the_operator_s_page_has_the_table_of_flags():
    assert flag_table() in (Path(__file__).parents[4] / "docs" / "operating.md").read_text()


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("1", 1),
        ("500 mb", 500_000_000),
        ("2Gi", 2 << 30),
        ("1.5kib", 1536),
        ("80%", 800),
        ("0.01 %", 1),
    ],
)
def test_a_memory_budget_is_bytes_or_a_share(text: str, nbytes: int) -> None:
    assert read_memory_budget(text, 1000) == nbytes


@pytest.mark.parametrize("text", ["0", "0.1", "-5%", "101%", "%", "GiB", "2G", "1e9", "nan", "²", "1,5GiB", "1" * 19])
def test_what_is_no_memory_budget(text: str) -> None:
    [problem] = problems(f"--memory-budget={text}")
    assert problem.startswith("--memory-budget: must be above 0: bytes, as 2GiB or 500MB, or a share")
    assert problem.endswith(f"(given: {text!r})")


@pytest.mark.parametrize(("line", "budget"), [("2000000000", "2000000000"), ('"80%"', "80%")])
def test_a_memory_budget_may_be_a_number_in_a_file(line: str, budget: str, tmp_path: Path) -> None:
    path = tmp_path / "vecd.toml"
    path.write_text(f"memory-budget = {line}\n")
    assert load_settings(["--config", str(path)]).memory_budget == budget


def test_a_memory_budget_may_not_be_a_truth_value(tmp_path: Path) -> None:
    path = tmp_path / "vecd.toml"
    path.write_text("memory-budget = true\n")
    with pytest.raises(ConfigurationError, match="memory_budget: must be a text"):
        load_settings(["--config", str(path)])


@pytest.mark.parametrize(
    ("flags", "environ", "expected"),
    [
        (["--cache-dir", "/tmp/c"], {"CACHE_DIRECTORY": "/var/cache/vecd"}, "/tmp/c"),
        ([], {"CACHE_DIRECTORY": "/var/cache/vecd"}, "/var/cache/vecd"),
        ([], {"CACHE_DIRECTORY": "/var/cache/a:/var/cache/b"}, "/var/cache/a"),
        ([], {"XDG_CACHE_HOME": "/home/u/.c"}, "/home/u/.c/vecd"),
        ([], {"XDG_CACHE_HOME": "relative"}, str(Path.home() / ".cache" / "vecd")),
    ],
)
def test_the_cache_folder_is_named_by_flag_then_service_then_user(flags, environ, expected, monkeypatch):
    for name in ("CACHE_DIRECTORY", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert load_settings(flags).cache_folder == Path(expected)
