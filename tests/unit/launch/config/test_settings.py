from pathlib import Path

import pytest

from vecd.launch.base.exit_codes import ConfigurationError
from vecd.launch.config.settings import flag_table, load_settings


@pytest.fixture(autouse=True)
def _clean(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    import os

    for name in [name for name in os.environ if name.startswith("VECD_")]:
        monkeypatch.delenv(name)


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        load_settings(argv)
    return caught.value.problems


def test_defaults():
    settings = load_settings([])
    assert (settings.host, settings.port, settings.workers, settings.model) == ("127.0.0.1", 8000, "auto", "")


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
        "must be a whole number of at most 65535 (given: '70000')",
        "--workers",
        "(given: '0')",
        "--device",
        "'tpu'",
    ):
        assert part in told


def test_a_flag_without_its_value_hides_no_other_problem():
    told = problems("--workers", "0", "--port")
    assert any("--port: expected one argument" in line for line in told)
    assert any(line.startswith("--workers:") for line in told)


def test_a_key_is_never_shown(monkeypatch):
    monkeypatch.setenv("VECD_API_KEY", "s3cret")
    assert "s3cret" not in repr(load_settings([]))
    monkeypatch.setenv("VECD_API_KEY", "  ")
    assert problems() == ["VECD_API_KEY: must not be blank"]


def test_an_empty_key_does_not_mean_none(monkeypatch, tmp_path):
    assert problems("--api-key=") == ["--api-key: must not be blank"]
    monkeypatch.setenv("VECD_API_KEY", "")
    assert problems() == ["VECD_API_KEY: is empty; give it a key, or remove it"]
    monkeypatch.delenv("VECD_API_KEY")
    (tmp_path / ".env").write_text("VECD_API_KEY=\n")
    assert problems() == [".env: VECD_API_KEY: is empty; give it a key, or remove it"]


def test_a_misspelt_line_of_dotenv_is_told(tmp_path):
    (tmp_path / ".env").write_text("VECD_PROT=1\nOTHER=2\n")
    assert problems() == [".env: VECD_PROT: there is no such setting; did you mean VECD_PORT?"]


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["--model", "org/m"], "--model: MODEL is positional: vecd serve MODEL"),
        (["--model-id=org/m"], "--model-id: MODEL is positional: vecd serve MODEL"),
        (["--wrokers", "2"], "--wrokers: did you mean --workers?"),
        (["--max-request", "2"], "--max-request: did you mean --max-requests?"),
        (["--tls-certificate=a"], "--tls-certificate: did you mean --tls-cert?"),
    ],
)
def test_a_flag_that_there_is_not_is_told_which_there_is(argv, hint):
    [problem] = problems(*argv)
    assert problem.startswith(f"unrecognized arguments: {argv[0]}")
    assert problem.endswith(f"; {hint}")


def test_what_is_like_no_setting_gets_no_guess(monkeypatch):
    monkeypatch.setenv("VECD_FOO", "1")
    assert problems("--zzzz") == ["unrecognized arguments: --zzzz", "VECD_FOO: there is no such setting"]


def test_a_line_of_the_file_is_told_which_setting_there_is(tmp_path):
    (tmp_path / "c.toml").write_text("wrokers = 1\nno-such-thing = 1\n")
    assert sorted(problems("--config", "c.toml")) == [
        "c.toml: no_such_thing: there is no such setting",
        "c.toml: wrokers: there is no such setting; did you mean workers?",
    ]


@pytest.mark.parametrize(
    ("argv", "must"),
    [
        (["--workers", "0"], "--workers: must be 'auto', or a whole number of at least 1 (given: '0')"),
        (["--workers", "2000"], "--workers: must be 'auto', or a whole number of at most 1024 (given: '2000')"),
        (["--workers", "two"], "--workers: must be 'auto', or a whole number (given: 'two')"),
        (
            ["--max-batch-tokens", "0"],
            "--max-batch-tokens: must be 'auto', or a whole number of at least 1 (given: '0')",
        ),
        (["--gateways", "0"], "--gateways: must be 'auto', or a whole number of at least 1 (given: '0')"),
        (["--gateways", "1.5"], "--gateways: must be 'auto', or a whole number (given: '1.5')"),
        (["--max-inputs", "0"], "--max-inputs: must be a whole number of at least 1 (given: '0')"),
        (["--max-inputs", "1.5"], "--max-inputs: must be a whole number (given: '1.5')"),
        (["--max-wait", "0"], "--max-wait: must be greater than 0 (given: '0')"),
        (["--max-wait", "x"], "--max-wait: must be a number (given: 'x')"),
        (["--device", "tpu"], "--device: must be 'auto', 'cpu' or 'cuda' (given: 'tpu')"),
    ],
)
def test_a_problem_is_a_sentence(argv, must):
    assert problems(*argv) == [must]


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
        (["--uds", "/s", "--port", "81"], "--port", "--uds"),
        (["--uds", "/s", "--host", "::1"], "--host", "--uds"),
        (["--admin-uds", "/s", "--admin-port", "81"], "--admin-port", "--admin-uds"),
    ],
)
def test_a_port_beside_a_unix_socket_is_told(flags, ignored, used, capfd):
    load_settings(flags)
    assert capfd.readouterr().err == f"vecd: warning: {ignored} is ignored, because {used} is given\n"


def test_a_port_beside_a_unix_socket_is_told_as_it_was_set(monkeypatch, capfd):
    monkeypatch.setenv("VECD_PORT", "81")
    load_settings(["--uds", "/s"])
    assert capfd.readouterr().err == "vecd: warning: VECD_PORT is ignored, because --uds is given\n"
    load_settings([])
    assert capfd.readouterr().err == ""


def test_a_descriptor_that_is_not_open_is_told():
    assert problems("--ready-fd", "999") == ["--ready-fd: is not an open file descriptor (given: '999')"]


@pytest.mark.parametrize(
    "origins",
    [
        "", "*", "null", "https://a.example", "http://localhost:3000, app://obsidian.md,null", "http://[::1]:8080",
        "chrome-extension://abcdefgh", "HTTPS://A.example:443", "http://127.0.0.1,", "https://xn--bcher-kva.example",
    ],
)  # fmt: skip
def test_origins(origins):
    assert load_settings(["--cors-origins", origins]).cors_origins == origins


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


def test_every_origin_and_another_one_contradict_each_other():
    [problem] = problems("--cors-origins", "*,https://a.example")
    assert "no other beside it" in problem


@pytest.mark.parametrize("names", ["", "10.0.0.1", "10.0.0.0/8, unix,2001:db8::/32", "::1"])
def test_proxies_are_addresses_networks_and_unix(names):
    assert load_settings(["--trusted-proxies", names]).trusted_proxies == names


def test_a_name_that_is_no_proxy_is_one_problem_that_names_it():
    [problem] = problems("--trusted-proxies", "10.0.0.1,proxy.local,10.0.0.1/8")
    assert problem.startswith("--trusted-proxies: 'proxy.local' is not a proxy: an address as 10.0.0.2")


def test_kubernetes_service_links_are_not_settings(monkeypatch):
    monkeypatch.setenv("VECD_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("VECD_PORT_8000_TCP", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("VECD_SERVICE_HOST", "10.0.0.1")
    assert load_settings([]).port == 8000


def test_an_unreadable_file_is_a_problem():
    assert "missing.toml" in problems("--config", "missing.toml")[0]


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as caught:
        load_settings(["--help"])
    assert caught.value.code == 0
    help_text = capsys.readouterr().out
    for line in flag_table().splitlines()[3:]:
        assert line.split("`")[1] in help_text


def test_the_operator_s_page_has_the_table_of_flags():
    assert flag_table() in (Path(__file__).parents[4] / "docs" / "operating.md").read_text()
