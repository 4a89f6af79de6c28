"""SIGHUP: the configuration is read again, and a server whose configuration cannot be used goes on as it was.

Without a model, but for those of `make soak`: that no request fails meanwhile is in `test_death.py`. One server has
keys and one gateway, the other TLS and two.
"""

import json
import re
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.certificates import make_certificate
from tests.support.serving import Server, eventually, exact_server, running_server
from tests.support.soak.faults import gateways
from tests.support.soak.form import only_long
from tests.support.texts import make_texts


def reload(server: Server, timeout_s: float = 60) -> None:
    """Ask for a reload and wait for its end. Fails when it was refused."""
    text = server.reload_outcome(timeout_s)
    assert "reloaded: " in text, text


@dataclass
class Configured:
    """A server, and the files that it reads again."""

    server: Server
    config: Path
    keys: Path = field(default_factory=Path)

    def change(self, line: str) -> None:
        """Write the configuration with this line in the place of that of the same setting."""
        kept = [each for each in self.config.read_text().splitlines() if each.split()[0] != line.split()[0]]
        self.config.write_text("\n".join([*kept, line]))

    def embed(self, num_texts: int = 1, key: str = "first") -> httpx.Response:
        headers = {"authorization": f"Bearer {secret(key)}"}
        body = {"input": ["a"] * num_texts}
        return httpx.post(f"{self.server.url}/v1/embeddings", json=body, headers=headers, timeout=60)

    def lives(self) -> list[tuple[int, int]]:
        info = httpx.get(f"{self.server.url}/info", headers={"authorization": f"Bearer {secret('first')}"}).json()
        return [(worker["worker"], worker["life"]) for worker in info["workers"]]


def secret(name: str) -> str:
    return f"a-key-of-{name}-and-more"


def entries_of(names: Sequence[str]) -> str:
    return "".join(
        f'[[keys]]\nname = "{name}"\nsha256 = "{sha256(secret(name).encode()).hexdigest()}"\n' for name in names
    )


NAMES = ["first", "second", *map(str, range(700))]
"""So many keys that a gateway takes a moment to read them."""


@pytest.fixture(scope="module")
def configured(minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Configured]:
    """Of a model in the older layout: the transformer's files in a folder of their own, the modules' list above it."""
    folder = tmp_path_factory.mktemp("reload")
    model, config, keys = folder / "model", folder / "vecd.toml", folder / "keys.toml"
    shutil.copytree(minilm_folder, model / "0_Transformer")
    shutil.move(model / "0_Transformer" / "1_Pooling", model / "1_Pooling")
    modules = json.loads((model / "0_Transformer" / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (model / "modules.json").write_text(json.dumps(modules))
    (model / "0_Transformer" / "modules.json").unlink()
    keys.write_text(entries_of(NAMES))
    config.write_text(f'model = "{model}"\nworkers = 1\nmax-inputs = 2\n')
    with running_server("--engine", "dummy", "--config", str(config), "--keys-file", str(keys)) as server:
        yield Configured(server, config, keys)


@pytest.fixture
def one(configured: Configured) -> Iterator[Configured]:
    """With its configuration of before afterwards."""
    before = configured.config.read_bytes(), configured.keys.read_bytes()
    yield configured
    configured.config.write_bytes(before[0])
    configured.keys.write_bytes(before[1])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("max-inputs = 0", "max_inputs"),
        ("no-such-setting = 1", "no_such_setting"),
        ("admin-port = 0", "admin_port: cannot be changed while serving"),
        ("gateways = 2", "gateways: cannot be changed while serving"),
        ('model = "/nowhere/at-all"', "/nowhere/at-all"),
        ("this is not TOML", "cannot be read"),
        # They get further before they are refused, and leave no descriptors.
        ("workers = 1000", "workers: 1000 given, at most 64 without a restart"),
        ('dtype = "int8"', "int8"),
        ('device = "cuda"', "cuda"),
    ],
)
def test_a_configuration_that_cannot_be_used_changes_nothing(one, line, said):
    if line.startswith("device") and list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is a GPU")
    before = one.lives()
    supervisor, num_fds = one.server.processes()[0], []
    one.change(line)
    for _ in range(4 if line.startswith(("workers", "dtype", "device")) else 1):
        outcome = one.server.reload_outcome()
        assert "not reloaded, nothing has changed: " in outcome
        assert said in outcome
        num_fds.append(supervisor.num_fds())
    assert num_fds[-1] <= num_fds[0] + 1  # another connection, or a file that is being read now
    assert one.lives() == before
    assert one.embed().status_code == 200


def test_files_that_hold_nonsense_change_nothing(one):
    """They are read by many libraries, each with exceptions of its own."""
    good_keys = one.keys.read_bytes()
    for file, nonsense in (
        (one.server.folder / ".env", "VECD_MODEL=caf\u00e9".encode("latin-1")),
        (one.config, b"x = " + b"[" * 20_000),
        (one.config, b"max-inputs = " + b"9" * 5_000),
        (one.keys, b"x = " + b"[" * 20_000),
        (one.keys, good_keys + b"tokens_per_s = " + b"9" * 400),
    ):
        before = file.read_bytes() if file.exists() else b""
        file.write_bytes(nonsense)
        assert "nothing has changed: " in one.server.reload_outcome()
        file.write_bytes(before)
        assert httpx.get(f"{one.server.url}/live").status_code == 200
    assert one.embed().status_code == 200


def test_a_reload_is_made_once_and_descriptors_do_not_pile_up(one):
    """Once, also of a model in the older layout."""
    [(_, life)], num_reloads = one.lives(), one.server.stderr.count("reloading")
    reload(one.server)
    kept = [one.server.processes()[0], one.server.gateway()]
    before = [process.num_fds() for process in kept]
    for _ in range(3):
        reload(one.server)
    assert one.embed().status_code == 200
    eventually(lambda: [process.num_fds() for process in kept] <= [n + 1 for n in before])
    assert one.lives() == [(0, life + 4)]
    assert one.server.stderr.count("reloading") == num_reloads + 4


def test_a_second_sighup_is_not_forgotten(one):
    assert one.embed(5).status_code == 400
    for _ in range(5):
        one.server.process.send_signal(signal.SIGHUP)
        time.sleep(0.01)
    one.change("max-inputs = 5")
    one.server.process.send_signal(signal.SIGHUP)
    eventually(lambda: one.embed(5).status_code == 200, 30)
    assert httpx.get(f"{one.server.url}/health").status_code == 200


def test_a_key_taken_out_while_a_gateway_starts_is_taken_out_there_too(one):
    assert [one.embed(key=name).status_code for name in ("first", "second", "699")] == [200, 200, 200]
    gateway, before = one.server.gateway(), one.server.stderr.count("keys read again")
    gateway.kill()
    eventually(lambda: not gateway.is_running())
    eventually(lambda: gateways(one.server) != [])
    [starting] = gateways(one.server)
    starting.suspend()
    one.keys.write_text(entries_of(NAMES[1:]))
    eventually(lambda: one.server.stderr.count("keys read again") > before)
    starting.resume()
    assert [one.embed(key=name).status_code for name in ("second", "first")] == [200, 401]


# --- several gateways -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Configured]:
    """Two gateways with TLS. `keys` is the key of the certificate."""
    folder = tmp_path_factory.mktemp("certified")
    certificate, config = make_certificate(folder), folder / "vecd.toml"
    config.write_text("max-inputs = 2\nworkers = 1")
    flags = ["--tls-cert", certificate.cert, "--tls-key", certificate.key, "--gateways", "2", "--config", str(config)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSL_CERT_FILE", certificate.cert)
        with running_server("--engine", "dummy", *flags) as server:
            yield Configured(server, config, Path(certificate.key))


def test_new_limits_hold_and_counters_go_on(certified):
    with httpx.Client(base_url=certified.server.url) as client:
        assert client.post("/v1/embeddings", json={"input": ["a"] * 3}).status_code == 400
        certified.config.write_text("max-inputs = 3\nworkers = 2\nmax-body-bytes = 2000")
        reload(certified.server)
        # On the connection of before, too.
        assert client.post("/v1/embeddings", json={"input": ["a"] * 3}).status_code == 200
        assert client.post("/v1/embeddings", json={"input": "a" * 3000}).status_code == 413
        assert len(client.get("/info").json()["workers"]) == 2
        assert sum(gateway["answered"] for gateway in client.get("/info").json()["gateways"]) >= 3
        assert client.get("/health").status_code == 200


def test_a_gateway_that_dies_meanwhile_comes_back_with_the_new_configuration(certified):
    server, num_reloads = certified.server, certified.server.stderr.count("reloaded: ")
    certified.config.write_text("max-inputs = 4\nworkers = 1")
    gateways = server.gateways()
    server.process.send_signal(signal.SIGHUP)
    gateways[0].kill()
    eventually(lambda: server.stderr.count("reloaded: ") > num_reloads, 30)
    gateways[1].kill()
    for _ in range(20):
        assert embed_again(certified, 4).status_code == 200


def embed_again(certified: Configured, num_texts: int) -> httpx.Response:
    """On a connection of its own, until a gateway takes it: the one that is killed takes its own along."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return certified.embed(num_texts)
        except httpx.TransportError:
            assert time.monotonic() < deadline


def test_a_gateway_that_cannot_start_again_does_not_end_the_others(certified):
    server, key = certified.server, certified.keys.read_bytes()
    eventually(lambda: len(server.gateways()) == 2, 30)
    with server.client_of(0), server.client_of(1):
        pass  # both have read the key
    certified.keys.write_bytes(key[:50])
    server.gateways()[0].kill()
    eventually(lambda: "gateway 0 cannot start" in server.stderr, 30)
    assert len(server.embed("the other one serves")) == 1
    certified.keys.write_bytes(key)
    eventually(lambda: 0 in server.gateways(), 60)


# --- only in make soak: another revision of a model -------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(reference):
    texts = [text[:400] for text in make_texts(8, seed=3)]
    return texts, reference(texts)


def flip_signs(folder) -> None:
    """Make a revision whose vectors are those of the first, negated: its last LayerNorm is. As a download is put in
    place, under the same name but not into the same file, which the old workers have mapped."""
    weights = load_file(folder / "model.safetensors")
    last = max((name for name in weights if name.endswith("output.LayerNorm.weight")), key=_layer)
    for name in (last, last.replace("weight", "bias")):
        weights[name] = -weights[name]
    save_file(weights, folder / "new", {"format": "pt"})
    (folder / "new").rename(folder / "model.safetensors")


def _layer(name: str) -> tuple[int, bool]:
    found = re.search(r"layer\.(\d+)\.", name)
    return (int(found[1]) if found else -1, "attention" not in name)


@only_long
def test_files_changed_without_a_word_make_no_mixture(minilm_folder, tmp_path, corpus):
    """The fork server dies after another revision was put in place: whatever reads it then, so must all others."""
    texts, expected = corpus
    folder = tmp_path / "model"
    shutil.copytree(minilm_folder, folder)
    with exact_server(str(folder), "--workers", "1") as server:
        flip_signs(folder)
        server.fork_server().kill()
        eventually(lambda: "reloaded: " in server.stderr, 90)
        assert "changed; reloading" in server.stderr
        assert np.abs(np.array(server.embed(texts)) + expected).max() < 1e-5
