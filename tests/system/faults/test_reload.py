"""SIGHUP: the configuration is read again, new workers before the old ones go, and no request fails."""

import asyncio
import json
import re
import shutil
import signal
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.certificates import make_certificate
from tests.support.serving import Load, Server, eventually, exact_server, running_server
from tests.support.soak.form import only_long
from tests.support.texts import make_texts


@pytest.fixture(scope="module")
def corpus(reference):
    texts = [text[:400] for text in make_texts(96, seed=3)]
    return texts, reference(texts)


def reload(server: Server, timeout_s: float = 60) -> None:
    """Ask for a reload and wait for its end. Fails when it was refused."""
    text = server.reload_outcome(timeout_s)
    assert "reloaded: " in text, text


def lives(server: Server) -> list[int]:
    return [worker["life"] for worker in server.info()["workers"]]


def test_no_request_fails_while_workers_are_replaced(corpus):
    async def reload_under_load(server: Server) -> Load:
        async with Load(server.url, corpus, num_clients=16) as load:
            await load.answers(50)
            await asyncio.to_thread(reload, server)
            await load.answers(50)
        return load

    with exact_server() as server:
        num_before = len(server.processes())
        load = asyncio.run(reload_under_load(server))
        assert load.failures == []
        assert set(lives(server)) == {2}
        eventually(lambda: len(server.processes()) == num_before)


@only_long
def test_a_new_revision_of_the_model_is_served_and_never_a_mixture(minilm_folder, tmp_path, corpus):
    texts, expected = corpus
    folder = tmp_path / "model"
    shutil.copytree(minilm_folder, folder)
    with exact_server(str(folder), "--workers", "1") as server:
        assert np.abs(np.array(server.embed(texts[:8])) - expected[:8]).max() < 1e-5
        flip_signs(folder)
        assert np.abs(np.array(server.embed(texts[:8])) - expected[:8]).max() < 1e-5
        reload(server)
        flipped = np.array(server.embed(texts[:8]))
        assert np.abs(flipped + expected[:8]).max() < 1e-5


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


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("max-inputs = 0", "max_inputs"),
        ("no-such-setting = 1", "no_such_setting"),
        ("admin-port = 0", "admin_port: cannot be changed while serving"),
        ("gateways = 2", "gateways: cannot be changed while serving"),
        ("workers = 1000", "workers: 1000 given, at most 64 without a restart"),
        ('model = "/nowhere/at-all"', "/nowhere/at-all"),
        ("this is not TOML", "cannot be read"),
    ],
)
def test_a_configuration_that_cannot_be_used_changes_nothing(weightless, line, said):
    server, config = weightless
    before = server.info()["workers"]
    config.write_text(line)
    outcome = server.reload_outcome()
    assert "not reloaded, nothing has changed: " in outcome
    assert said in outcome
    assert [(w["worker"], w["life"]) for w in server.info()["workers"]] == [(w["worker"], w["life"]) for w in before]
    assert len(server.embed("still there")) == 1


@pytest.fixture(scope="module")
def weightless(tmp_path_factory):
    config = tmp_path_factory.mktemp("config") / "vecd.toml"
    config.write_text("workers = 1")
    with running_server("--engine", "weightless", "--config", str(config)) as server:
        yield server, config


def test_new_limits_hold_and_counters_go_on(tmp_path):
    config = tmp_path / "vecd.toml"
    config.write_text("max-inputs = 2\nworkers = 1")
    flags = ["--engine", "weightless", "--gateways", "2", "--config", str(config)]
    with running_server(*flags) as server, httpx.Client(base_url=server.url) as client:
        assert client.post("/v1/embeddings", json={"input": ["a"] * 3}).status_code == 400
        config.write_text("max-inputs = 3\nworkers = 2\nmax-body-bytes = 2000")
        reload(server)
        # On the connection of before, too.
        assert client.post("/v1/embeddings", json={"input": ["a"] * 3}).status_code == 200
        assert client.post("/v1/embeddings", json={"input": "a" * 3000}).status_code == 413
        assert len(client.get("/info").json()["workers"]) == 2
        assert sum(gateway["answered"] for gateway in client.get("/info").json()["gateways"]) >= 3
        assert client.get("/health").status_code == 200


def test_descriptors_do_not_pile_up():
    with running_server("--engine", "weightless", "--workers", "2") as server:
        reload(server)
        kept = [server.processes()[0], server.gateway()]
        before = [process.num_fds() for process in kept]
        for _ in range(3):
            reload(server)
        server.embed("a text")
        eventually(lambda: [process.num_fds() for process in kept] <= [n + 1 for n in before])


@pytest.mark.parametrize("line", ['dtype = "int8"', 'device = "cuda"', "workers = 1000"])
def test_descriptors_of_refused_reloads_do_not_pile_up(weightless, line):
    server, config = weightless
    if line.startswith("device") and list(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("there is a GPU")
    supervisor = server.processes()[0]
    config.write_text(line)
    assert "nothing has changed: " in server.reload_outcome()
    before = supervisor.num_fds()
    for _ in range(4):
        assert "nothing has changed: " in server.reload_outcome()
    assert supervisor.num_fds() <= before + 1  # another connection, or a file that is being read now


def test_a_gateway_that_dies_meanwhile_comes_back_with_the_new_configuration(tmp_path):
    config = tmp_path / "vecd.toml"
    config.write_text("max-inputs = 2")
    with running_server(
        "--engine", "weightless", "--workers", "1", "--gateways", "2", "--config", str(config)
    ) as server:
        config.write_text("max-inputs = 3")
        gateways = server.gateways()
        server.process.send_signal(signal.SIGHUP)
        gateways[0].kill()
        eventually(lambda: "reloaded: " in server.stderr, 30)
        gateways[1].kill()
        for _ in range(20):
            answer = post_again(server, {"input": ["a"] * 3})
            assert answer.status_code == 200
        eventually(lambda: lives(server) == [2])


def post_again(server: Server, fields: dict) -> httpx.Response:
    """On a connection of its own, until a gateway takes it: the one that is killed takes its own along."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return httpx.post(f"{server.url}/v1/embeddings", json=fields, timeout=30)
        except httpx.TransportError:
            assert time.monotonic() < deadline


def test_sigterm_in_the_middle_of_a_reload_ends_everything():
    with running_server("--workers", "1") as server:
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: "reloading" in server.stderr)
        time.sleep(0.5)


def test_a_second_sighup_is_not_forgotten(tmp_path):
    config = tmp_path / "vecd.toml"
    config.write_text("max-inputs = 2")
    with running_server("--engine", "weightless", "--workers", "1", "--config", str(config)) as server:
        for _ in range(5):
            server.process.send_signal(signal.SIGHUP)
            time.sleep(0.01)
        config.write_text("max-inputs = 5")
        server.process.send_signal(signal.SIGHUP)
        eventually(lambda: server.info()["limits"]["max_inputs"] == 5, 30)
        assert httpx.get(f"{server.url}/health").status_code == 200


@only_long
def test_files_changed_without_a_word_make_no_mixture(minilm_folder, tmp_path, corpus):
    """The fork server dies after another revision was put in place: whatever reads it then, so must all others."""
    texts, expected = corpus
    folder = tmp_path / "model"
    shutil.copytree(minilm_folder, folder)
    with exact_server(str(folder), "--workers", "1") as server:
        flip_signs(folder)
        psutil.Process(server.workers()[0].ppid()).kill()
        eventually(lambda: "reloaded: " in server.stderr, 90)
        assert "changed; reloading" in server.stderr
        assert np.abs(np.array(server.embed(texts[:8])) + expected[:8]).max() < 1e-5


def test_a_model_in_the_older_layout_is_reloaded_once(minilm_folder, tmp_path):
    """The transformer's files in a folder of their own, the modules' list above it."""
    folder = tmp_path / "model"
    shutil.copytree(minilm_folder, folder / "0_Transformer")
    shutil.move(folder / "0_Transformer" / "1_Pooling", folder / "1_Pooling")
    modules = json.loads((folder / "0_Transformer" / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "0_Transformer" / "modules.json").unlink()
    with running_server("--engine", "weightless", "--workers", "1", str(folder)) as server:
        reload(server)
        time.sleep(1)
        assert lives(server) == [2]
        assert server.stderr.count("reloading") == 1


def test_files_that_hold_nonsense_change_nothing(tmp_path):
    """They are read by many libraries, each with exceptions of its own."""
    config, keys, dotenv = tmp_path / "vecd.toml", tmp_path / "keys.toml", Path(".env")
    good_keys = f'[[keys]]\nname = "first"\nsha256 = "{sha256(b"a-key-of-a-good-length").hexdigest()}"\n'
    config.write_text("max-inputs = 2")
    keys.write_text(good_keys)
    flags = ["--engine", "weightless", "--workers", "1", "--config", str(config), "--keys-file", str(keys)]
    with running_server(*flags) as server:
        for file, nonsense in (
            (server.folder / dotenv, "VECD_MODEL=caf\u00e9".encode("latin-1")),
            (config, b"x = " + b"[" * 20_000),
            (config, b"max-inputs = " + b"9" * 5_000),
            (keys, b"x = " + b"[" * 20_000),
            (keys, good_keys.encode() + b"tokens_per_s = " + b"9" * 400),
        ):
            before = file.read_bytes() if file.exists() else b""
            file.write_bytes(nonsense)
            assert "nothing has changed: " in server.reload_outcome()
            file.write_bytes(before)
            assert httpx.get(f"{server.url}/live").status_code == 200
        authorized = {"authorization": "Bearer a-key-of-a-good-length"}
        answer = httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}, headers=authorized)
        assert answer.status_code == 200


def test_a_gateway_that_cannot_start_again_does_not_end_the_others(tmp_path, monkeypatch):
    certificate = make_certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", certificate.cert)
    flags = ["--tls-cert", certificate.cert, "--tls-key", certificate.key, "--gateways", "2"]
    with running_server("--engine", "weightless", "--workers", "1", *flags) as server:
        key = Path(certificate.key).read_bytes()
        gateway = server.gateways()[0]
        Path(certificate.key).write_bytes(key[:50])
        gateway.kill()
        eventually(lambda: "gateway 0 cannot start" in server.stderr, 30)
        assert len(server.embed("the other one serves")) == 1
        Path(certificate.key).write_bytes(key)
        eventually(lambda: 0 in server.gateways(), 60)


def test_a_key_taken_out_while_a_gateway_starts_is_taken_out_there_too(tmp_path):
    keys = tmp_path / "keys.toml"
    entries = [
        f'[[keys]]\nname = "{name}"\nsha256 = "{sha256(f"a-key-of-{name}-and-more".encode()).hexdigest()}"\n'
        for name in ("first", "second", *map(str, range(700)))
    ]
    keys.write_text("".join(entries))

    def status(name: str) -> int:
        headers = {"authorization": f"Bearer a-key-of-{name}-and-more"}
        return httpx.post(f"{server.url}/v1/embeddings", json={"input": "a"}, headers=headers, timeout=60).status_code

    with running_server("--engine", "weightless", "--workers", "1", "--keys-file", str(keys)) as server:
        assert (status("first"), status("second"), status("699")) == (200, 200, 200)
        gateway = server.gateway()
        gateway.kill()
        eventually(lambda: not gateway.is_running())
        eventually(lambda: gateways_of(server) != [])
        [starting] = gateways_of(server)
        starting.suspend()
        keys.write_text("".join(entries[1:]))
        eventually(lambda: "keys read again" in server.stderr)
        starting.resume()
        assert (status("second"), status("first")) == (200, 401)


def gateways_of(server: Server) -> list[psutil.Process]:
    """By their command lines: one that is starting answers nothing yet."""
    found = []
    for child in psutil.Process(server.pid).children():
        with suppress(psutil.Error):
            if "gateway" in child.cmdline() and child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found
