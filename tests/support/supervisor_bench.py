"""A supervisor whose children, files and time are fakes, from its start to its end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.supervision import FakeGateway, FakeNotifier, Fakes, FakeSocket, settle
from vecd.launch.config.models import ModelEntry, load_models
from vecd.launch.config.plan import make_plans
from vecd.launch.config.settings import load_settings
from vecd.launch.sockets import Inherited, Listeners
from vecd.launch.systemd.reload_command import ReloadSocket
from vecd.shm.control import Heartbeat
from vecd.shm.settings import Settings
from vecd.supervisor import Supervisor

WATCHDOG_S = 2.0
Models = dict[str, dict[str, Any]]
"""By name, in the order of the configuration: the settings that are not the server's."""


def configure(monkeypatch: pytest.MonkeyPatch, configured: Models) -> None:
    """Let the configuration have these models whenever it is read; they may be changed in between."""

    def load(settings: Settings) -> tuple[ModelEntry, ...]:
        return tuple(
            ModelEntry(name, replace(settings, served_model_name=name, **table)) for name, table in configured.items()
        )

    for module in ("vecd.supervisor", "tests.support.supervisor_bench"):
        monkeypatch.setattr(f"{module}.load_models", load)


class FakeReloadSocket(ReloadSocket):
    """Owns no socket, and keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(lambda: None, lambda: "")
        self.results: list[asyncio.Future[list[str]]] = []
        """Of all reloads that were requested, in whatever way."""
        self.is_listening = False

    @property
    def num_done(self) -> int:
        return sum(result.done() for result in self.results)

    @property
    def problems(self) -> list[str]:
        return [result.result() for result in self.results if result.done()][-1]

    async def listen(self) -> None:
        self.is_listening = True

    def close(self) -> None:
        self.is_listening = False


class Bench:
    def __init__(self, folder: Path, fakes: Fakes, arguments: list[str]) -> None:
        self.folder, self.fakes, self.arguments, self.notifier = folder, fakes, arguments, FakeNotifier(WATCHDOG_S)
        self.config = folder / "vecd.toml"
        self.socket = FakeSocket()
        listeners = Listeners(Settings(), Inherited(public=self.socket))  # type: ignore[arg-type]
        self.plans = make_plans(load_models(load_settings(arguments)))
        self.supervisor = Supervisor(self.plans, arguments, self.notifier, listeners, system=fakes.system)
        self.reloads = self.supervisor.reload_socket = FakeReloadSocket()
        request_reload = self.supervisor.request_reload

        def request() -> "asyncio.Future[list[str]] | None":
            if (result := request_reload()) is not None:
                self.reloads.results.append(result)
            return result

        self.supervisor.request_reload = request  # type: ignore[method-assign]
        self.task = asyncio.create_task(self.supervisor.run())

    @property
    def generations(self) -> list[int]:
        """The one that each living gateway serves with."""
        return [gateway._generation for gateway in self.fakes.gateways if gateway.is_alive]

    @property
    def status(self) -> str:
        return self.notifier.said("STATUS=")[-1]

    async def reload(self, seconds: float = 1) -> None:
        self.supervisor.request_reload()
        await settle(seconds)

    def close_plans(self) -> None:
        """To be called once, when the supervisor has ended."""
        for worker_pool in self.supervisor.reloader.active:
            worker_pool.plan.close()

    async def end(self) -> int:
        self.supervisor.stop()
        return await self.task


@asynccontextmanager
async def supervising(
    model: Path, folder: Path, *flags: str, config: str = "workers = 2\n", **attributes: Any
) -> AsyncIterator[Bench]:
    """A supervisor that has started, and ends with the block. `attributes` are those of each gateway."""
    (folder / "vecd.toml").write_text(config)
    fakes = Fakes()

    def on_spawn(gateway: FakeGateway) -> None:
        for name, value in attributes.items():
            setattr(gateway, name, value)

    fakes.on_spawn = on_spawn
    arguments = [str(model), "--engine", "dummy", "--config", str(folder / "vecd.toml"), *flags]
    bench = Bench(folder, fakes, arguments)
    try:
        await settle()
        yield bench
    finally:
        bench.supervisor.stop()
        bench.supervisor.stop()
        await asyncio.wait([bench.task])
        bench.close_plans()
    assert not fakes.living
    assert bench.socket.is_closed
    assert not bench.reloads.is_listening


def beat(gateway: FakeGateway, seconds: int = 10_000) -> None:
    """Send heartbeats as a healthy gateway does, for so long."""

    def send(num_left: int) -> None:
        gateway.inbox.put_nowait(Heartbeat())
        if num_left > 1:
            asyncio.get_running_loop().call_later(1, send, num_left - 1)

    send(seconds)
