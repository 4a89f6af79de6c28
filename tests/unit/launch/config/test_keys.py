import os
import re
from hashlib import sha256
from pathlib import Path

import pytest

from vecd.base.failures import ConfigurationError
from vecd.gateway.config import SCOPES, ApiKey
from vecd.gateway.scheduling.keys import Principals
from vecd.launch.config import keys as keys_module
from vecd.launch.config.keys import load_keys, main
from vecd.launch.config.models import load_models
from vecd.launch.config.settings import load_settings

KEY = "0123456789abcdef"


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def load(*argv: str) -> tuple[ApiKey, ...]:
    return load_keys(load_settings(argv))


def problems(*argv: str) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        load(*argv)
    return caught.value.problems


def keys_file(text: str, mode: int = 0o600) -> str:
    path = Path("keys.toml")
    path.write_text(text)
    path.chmod(mode)
    return str(path.absolute())


def from_file(text: str, mode: int = 0o600) -> tuple[ApiKey, ...]:
    return load("--keys-file", keys_file(text, mode))


def problems_of_file(text: str, mode: int = 0o600) -> list[str]:
    path = keys_file(text, mode)
    return [problem.removeprefix(f"{path}: ") for problem in problems("--keys-file", path)]


def test_one_key_may_do_everything_and_be_of_any_length():
    assert load("--api-key", "k") == (ApiKey("default", digest("k")),)
    assert load("--api-key", "k")[0].scopes == SCOPES


def test_a_list_of_keys(monkeypatch):
    monkeypatch.setenv("VECD_API_KEYS", f"team-a={KEY}, team-b=padded-key-abc==")
    assert load() == (ApiKey("team-a", digest(KEY)), ApiKey("team-b", digest("padded-key-abc==")))


def test_a_file_of_keys_with_all_fields():
    assert from_file(
        f"""
        [[keys]]
        name = "team-a"
        sha256 = "{digest(KEY).upper()}"
        scopes = ["metrics", "embed"]
        max_priority = "normal"
        tokens_per_s = 2.5
        max_requests = 8

        [[keys]]
        name = "team-b"
        key = "{KEY}-b"
        """
    ) == (
        ApiKey("team-a", digest(KEY), ("embed", "metrics"), "normal", 2.5, 8),
        ApiKey("team-b", digest(f"{KEY}-b")),
    )


def test_all_sources_together():
    path = keys_file(f'[[keys]]\nname = "c"\nsha256 = "{digest("c")}"\n')
    found = load("--api-key", "a", "--api-keys", f"b={KEY}", "--keys-file", path)
    assert [key.name for key in found] == ["default", "b", "c"]


def test_all_problems_are_told_at_once_with_file_entry_and_field():
    assert problems_of_file(
        f"""
        colour = 1
        [[keys]]
        name = "a b"
        key = "short"
        scope = []
        [[keys]]
        sha256 = "12"
        scopes = ["embed", "all"]
        max_priority = "highest"
        tokens_per_s = 0
        max_requests = 1.5
        [[keys]]
        name = "both"
        key = "{KEY}"
        sha256 = "{digest(KEY)}"
        [[keys]]
        name = 7
        key = ["{KEY}"]
        scopes = []
        tokens_per_s = nan
        max_requests = true
        """
    ) == [
        "colour: is in no entry, and entries begin with [[keys]]",
        "entry 1: scope: there is no such field",
        "entry 1: name: must have 1 to 64 of the characters A-Z a-z 0-9 . _ -",
        "entry 1: key: has 5 characters, at least 16 are needed (vecd key NAME makes one)",
        "entry 2: name: is missing",
        "entry 2: sha256: must be the 64 hexadecimal digits of the key's SHA-256",
        "entry 2: scopes: must be a list of one or more of embed, metrics, admin",
        "entry 2: max_priority: must be 'interactive', 'normal' or 'bulk'",
        "entry 2: tokens_per_s: must be a number from 0.001 to 1000000000000",
        "entry 2: max_requests: must be a whole number from 1 to 1000000000",
        "entry 3: key, sha256: one of the two is needed",
        "entry 4: name: must have 1 to 64 of the characters A-Z a-z 0-9 . _ -",
        "entry 4: key: must be a string of printable characters without spaces",
        "entry 4: scopes: must be a list of one or more of embed, metrics, admin",
        "entry 4: tokens_per_s: must be a number from 0.001 to 1000000000000",
        "entry 4: max_requests: must be a whole number from 1 to 1000000000",
    ]


def test_duplicates_are_refused_wherever_they_stand():
    path = keys_file(
        f"""
        [[keys]]
        name = "team-a"
        key = "{KEY}"
        [[keys]]
        name = "team-b"
        sha256 = "{digest(KEY)}"
        [[keys]]
        name = "default"
        key = "{KEY}-c"
        """
    )
    assert problems("--api-key", KEY + "x", "--api-keys", f"team-a={KEY}-a", "--keys-file", path) == [
        f"{path}: entry 1: name: is the same as that of --api-keys: entry 1",
        f"{path}: entry 2: key: is the same as that of {path}: entry 1",
        f"{path}: entry 3: name: is the same as that of --api-key",
    ]


ENTRY = f'[[keys]]\nname = "a"\nsha256 = "{digest(KEY)}"\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no keys"),
        ("keys = []", "has no keys"),
        ("[keys]\nname = 'a'", "keys: must be tables, each beginning with [[keys]]"),
        ("keys = [1]", "keys: must be tables, each beginning with [[keys]]"),
        (f"x = 1{'0' * 5000}", "is not valid TOML"),  # more digits than Python reads
        (f"x = {'[' * 100_000}", "is not valid TOML"),
        ("x = 2026-02-30", "is not valid TOML"),
        (f"{ENTRY}tokens_per_s = 1{'0' * 400}", "entry 1: tokens_per_s: must be a"),
        (f"{ENTRY}max_requests = 1_000_000_001", "entry 1: max_requests: must be a"),
        (ENTRY.replace('"a"', f'"{"n" * 65}"'), "entry 1: name: must have 1 to 64"),
    ],
)
def test_a_file_is_refused_in_one_line(text, problem):
    [told] = problems_of_file(text)
    assert told.startswith(problem)


@pytest.mark.parametrize("limits", ["tokens_per_s = 1e12\nmax_requests = 1_000_000_000", "tokens_per_s = 0.001"])
def test_limits_and_names_at_their_bounds(limits):
    [key] = from_file(ENTRY.replace('"a"', f'"{"n" * 64}"') + limits)
    [principal] = Principals([key], num_gateways=64).with_keys
    with principal.reserve(10):
        pass


def test_a_file_that_cannot_be_read(tmp_path):
    """A pipe is not waited for, and a file of too many bytes is not read."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        assert problems("--keys-file", str(path)) == [f"{path}: cannot be read: not a regular file"]
    with (tmp_path / "large.toml").open("wb") as file:
        file.truncate(2**40)
    [problem] = problems("--keys-file", str(tmp_path / "large.toml"))
    assert "has more than 8388608 bytes" in problem
    assert problems("--keys-file", "nowhere.toml") == [
        f"{tmp_path / 'nowhere.toml'}: cannot be read: No such file or directory"
    ]
    assert problems("--keys-file", str(tmp_path)) == [f"{tmp_path}: cannot be read: Is a directory"]
    Path("keys.toml").write_bytes(b'name = "\xff"')
    assert problems("--keys-file", "keys.toml") == [f"{tmp_path / 'keys.toml'}: is not UTF-8"]


def test_there_are_at_most_10_000_keys(monkeypatch):
    # Numbers, and not texts of megabytes: `MAX_KEYS` itself is what is told.
    assert keys_module.MAX_KEYS == 10_000
    monkeypatch.setattr(keys_module, "MAX_KEYS", 3)
    entries = [f'[[keys]]\nname = "{n}"\nsha256 = "{digest(str(n))}"\n' for n in range(4)]
    assert len(from_file("".join(entries[:3]))) == 3
    assert problems_of_file("".join(entries)) == ["has 4 keys, at most 3 may be"]
    path = keys_file("".join(entries[:3]))
    assert problems("--keys-file", path, "--api-key", "k") == ["there are 4 keys, at most 3 may be"]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_keys_that_others_may_read_are_refused_but_not_their_digests(mode):
    [problem] = problems_of_file(f'[[keys]]\nname = "a"\nkey = "{KEY}"\n', mode)
    assert f"mode {mode:03o}" in problem
    assert len(from_file(f'[[keys]]\nname = "a"\nsha256 = "{digest(KEY)}"\n', mode)) == 1


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org"])
def test_an_admin_listener_that_others_may_reach_needs_a_key(host):
    assert load("--admin-port", "0") == load("--admin-port", "0", "--admin-host", "::1") == ()
    flags = ["--admin-port", "0", "--admin-host", host]
    [problem] = problems(*flags)
    assert problem.startswith(f"--admin-host: {host} may be reached from other machines")
    path = keys_file(f'[[keys]]\nname = "a"\nsha256 = "{digest(KEY)}"\nscopes = ["embed", "metrics"]\n')
    assert len(problems(*flags, "--keys-file", path)) == 1
    path = keys_file(f'[[keys]]\nname = "a"\nsha256 = "{digest(KEY)}"\nscopes = ["admin"]\n')
    assert len(load(*flags, "--keys-file", path)) == 1


SECRET = "s3cret-s3cret-s3cret"


@pytest.mark.parametrize(
    "text",
    [
        f'[[keys]]\nname = "a"\nkey = {SECRET}\n',
        f'{SECRET} = "a"\n',
        f'[[keys]]\nname = "a"\n{SECRET} = "a"\n',
        f'[[keys]]\nname = "a"\nsha256 = "{SECRET}"\n',
        f'[[keys]]\nname = "a"\nkey = "{SECRET}\n',
        f"[[keys]]\n{SECRET} = 1\n{SECRET} = 2\n",
        f'[[keys]]\nname = "{SECRET} {SECRET}"\nkey = " {SECRET}"\n',
        f'[[keys]]\nname = "a"\nkey = "{SECRET}"\n[[keys]]\nname = "b"\nkey = "{SECRET}"\n',
        f'[[keys]]\nname = "a"\nkey = "{SECRET}"\nscopes = ["{SECRET}"]\nmax_priority = "{SECRET}"\n',
    ],
)
def test_no_message_about_a_file_shows_a_key(text):
    told = "\n".join(problems_of_file(text))
    assert told
    assert "s3cret" not in told


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (SECRET, "entry 1: must be NAME=KEY"),
        (f"{SECRET}==", "entry 1: key: has 1 characters"),
        ("a=s3cret", "entry 1: key: has 6 characters, at least 16"),
        (f"a={SECRET},a={SECRET}x", "entry 2: name: is the same as that of --api-keys: entry 1"),
        (f"a={SECRET},", "entry 2: must be NAME=KEY"),
        (f"a={SECRET},{SECRET} ={SECRET}", "entry 2: name: must have"),
        (f"a={SECRET},b={SECRET}", "entry 2: key: is the same as that of --api-keys: entry 1"),
    ],
)
def test_no_message_about_a_list_shows_a_key(text, says):
    [problem, *_] = problems("--api-keys", text)
    assert says in problem
    assert "s3cret" not in "".join(problems("--api-keys", text))


def test_a_new_key_is_random_and_its_entry_is_that_of_the_key(capsys):
    made = []
    for _ in range(2):
        assert main(["team-a"]) == 0
        out = capsys.readouterr().out
        key = re.search(r"^[\w-]{43}$", out, re.MULTILINE)
        assert key is not None
        made.append(key[0])
        assert from_file(out[out.index("[[keys]]") :], 0o644) == (ApiKey("team-a", digest(key[0]), ("embed",)),)
    assert made[0] != made[1]


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["a", "b"], 2), (["a b"], 2), (["--help"], 0)])
def test_how_a_key_is_made_is_said(arguments, code, capsys):
    assert main(arguments) == code
    said = capsys.readouterr()
    assert "usage: vecd key NAME" in said.out + said.err


# --- models -----------------------------------------------------------------------------------------------------------

MODELS = f'[[keys]]\nname = "a"\nkey = "{KEY}"\nmodels = '


@pytest.mark.parametrize(
    ("listed", "models"),
    [('["first"]', ("first",)), ('["other", "second", "org/third"]', ("second", "org/third"))],
)
def test_a_key_has_models_by_their_names_and_aliases(listed, models):
    path = keys_file(MODELS + listed)
    Path("vecd.toml").write_text('[models.second]\naliases = ["other"]\n[models."org/third"]\n')
    given = ("first=/models/one", "--config", "vecd.toml", "--keys-file", path)
    assert [key.models for key in load(*given)] == [models]
    settings = [entry.settings for entry in load_models(load_settings(given))]
    assert [key.models for each in settings for key in load_keys(each)] == [models] * 3, "as they are read again"


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ((), "all-MiniLM-L6-v2"),
        (("org/name",), "org/name"),
        (("/models/one", "--served-model-name", "two", "--model-aliases", "x,two-b"), "two"),
    ],
)
def test_a_key_has_the_only_model_by_its_name(argv, name):
    [key] = load(*argv, "--keys-file", keys_file(f'{MODELS}["{name}"]'))
    assert key.models == (name,)
    if name == "two":
        assert load(*argv, "--keys-file", keys_file(f'{MODELS}["two-b"]'))[0].models == ("two",)


@pytest.mark.parametrize("listed", ["[]", "{}", "{ first = 1 }", '["first", 1]', "true"])
def test_models_are_a_list_of_names(listed):
    [problem] = problems("first=/models/one", "--keys-file", keys_file(MODELS + listed))
    assert problem.endswith('entry 1: models: must be a list of one or more names of models, ["NAME"]')


def test_a_model_that_is_not_configured_is_a_problem():
    path = keys_file(f'{MODELS}["secund", "first", "{KEY}"]')
    assert problems("first=/models/one", "second=/models/two", "--keys-file", path) == [
        f"{path}: entry 1: models: name 1: is neither that nor an alias of a configured model; did you mean second?",
        f"{path}: entry 1: models: name 3: is neither that nor an alias of a configured model; there are first, second",
    ]
    [problem] = problems("/models/one", "--keys-file", keys_file(f'{MODELS}["two"]'))
    assert "there are one" in problem
