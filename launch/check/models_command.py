"""`vecd models`: the models of a configuration, the memory that they need, and what a running server says of them.

Owns the command's arguments and its table. It reads the same settings as `vecd serve` and makes the same plans, but
downloads nothing, loads nothing and opens no port. Called by `vecd.launch.cli`.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vecd.client.connection import BadResponse, connect, name_failure, parse_target, render_request
from vecd.client.suggestions import flags_of
from vecd.launch.base.exit_codes import (
    EXIT_BAD_CONFIGURATION,
    EXIT_COULD_NOT_START,
    EXIT_OK,
    ConfigurationError,
    StartFailure,
)
from vecd.launch.config.models import BUNDLED_NAME, ModelEntry, load_models, name_of
from vecd.launch.config.plan import Plan, make_plan
from vecd.launch.config.settings import Settings, load_settings
from vecd.launch.memory.book import MemoryBook
from vecd.launch.memory.budget import as_table, in_mb, read_book, why_too_much
from vecd.shm.card import ModelError

_TIMEOUT_S = 5.0


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 the table is whole, 1 the server of --url does not say what it has, 2 bad arguments or settings, 3
    a model cannot be served."""
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        settings = load_settings(rest, other_flags=flags_of(parser))
        entries = load_models(settings)
        report = _describe(entries)
        url = options.url or _url_of(settings)
        running, why_not = _ask(url, settings, options) if url else ({}, "")
    except (ConfigurationError, StartFailure) as error:
        for line in error.problems if isinstance(error, ConfigurationError) else [str(error)]:
            print(f"vecd models: {line}", file=sys.stderr)
        return EXIT_BAD_CONFIGURATION
    for model in report["models"]:
        model.update(running.get(model["name"].lower(), {"state": None, "bytes": None, "loads": None}))
    report |= {"url": url or None, "error": why_not or None}
    print(json.dumps(report, ensure_ascii=False) if options.json else "\n".join(_render(report)))
    if why_not and options.url:
        print(f"vecd models: {url}: {why_not}", file=sys.stderr)
        return 1
    return EXIT_COULD_NOT_START if any(model["problem"] for model in report["models"]) else EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vecd models",
        usage="vecd models [MODEL…] [--url URL] [--ca FILE] [--insecure] [--json] [flags of vecd serve]",
        description="List the models of a configuration with the memory that each is expected to need, and their state "
        "in a running server. MODEL, --config, --memory-budget and every other flag, variable and file mean what they "
        "mean to vecd serve. --api-key is sent to the server.",
        epilog="Exit codes: 0, 1 the server of --url does not answer, 2 bad usage, 3 a model cannot be served.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--url", help="http://host:port, https://host:port or unix:/path; default: where the configuration listens")
    add("--ca", type=Path, metavar="FILE", help="PEM file of the certificates to trust, for an https:// address")
    add("--insecure", action="store_true", help="trust any certificate")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _url_of(settings: Settings) -> str:
    """Where a server with these settings answers /info; "" if it takes any free port."""
    if settings.admin_uds or (settings.uds and settings.admin_port is None):
        return f"unix:{settings.admin_uds or settings.uds}"
    port = settings.port if settings.admin_port is None else settings.admin_port
    host = settings.host if settings.admin_port is None else settings.admin_host
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "http" if settings.tls_cert is None or settings.admin_port is not None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}" if port else ""


# --- the configuration ----------------------------------------------------------------------------------------------


def _describe(entries: Sequence[ModelEntry]) -> dict[str, Any]:
    """Raises ConfigurationError for what the models share."""
    plans: list[Plan] = []
    made: list[Plan | str] = []
    for entry in entries:
        try:
            plans.append(plan := make_plan(entry.settings, lambda stage: None, num_gateways=_num_gateways(plans)))
            made.append(plan)
        except (ModelError, ConfigurationError) as error:
            made.append(str(error))
    try:
        book = read_book(plans) if plans else None
        models = [_model(entry, plan, book) for entry, plan in zip(entries, made, strict=True)]
        return {
            "budget_bytes": book and book.budget,
            "server_bytes": book and book.server_nbytes,
            "problems": why_too_much(plans, book) if book else [],
            "models": models,
        }
    finally:
        for plan in plans:
            plan.close()


def _num_gateways(plans: Sequence[Plan]) -> int | None:
    return plans[0].gateway.num_gateways if plans else None


def _model(entry: ModelEntry, plan: Plan | str, book: MemoryBook | None) -> dict[str, Any]:
    settings = entry.settings
    facts: dict[str, Any] = {
        "name": entry.name or name_of(settings.model),
        "aliases": list(entry.aliases),
        "kind": None,
        "source": settings.model or BUNDLED_NAME,
        "load": settings.load,
        "pinned": settings.pinned,
        "weight": entry.weight,
        "keep_alive_s": None,
        "expected_bytes": None,
        "is_measured": False,
        "problem": plan if isinstance(plan, str) else None,
    }
    if isinstance(plan, Plan):
        facts |= {"kind": "+".join(plan.card.capabilities), "keep_alive_s": plan.gateway.keep_alive_s}
        if book is not None:
            facts |= {"expected_bytes": book.expect(plan).total, "is_measured": book.recall(plan) is not None}
    return facts


# --- the running server ---------------------------------------------------------------------------------------------


def _ask(url: str, settings: Settings, options: argparse.Namespace) -> tuple[dict[str, dict[str, Any]], str]:
    """What a server says of each model, by its name in lower case; and why it says nothing, or "". Raises
    ConfigurationError for an address or a key that cannot be used."""
    key = settings.api_key.get_secret_value() if settings.api_key else None
    try:
        target = parse_target(url, options.ca, insecure=options.insecure)
        request = render_request(target, "/info", api_key=key, user_agent="vecd-models")
    except ValueError as error:
        raise ConfigurationError([f"--url: {error}"]) from None

    async def exchange() -> tuple[int, bytes]:
        connection = await connect(target, _TIMEOUT_S)
        response = await connection.exchange(request, _TIMEOUT_S)
        return response.status, response.body

    try:
        status, body = asyncio.run(exchange())
        if status != 200:
            return {}, f"answers /info with status {status}" + ("; it wants --api-key" if status == 401 else "")
        return _read_info(json.loads(body)), ""
    except (OSError, BadResponse) as error:
        return {}, f"does not answer: {name_failure(error)}"
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {}, "does not answer /info as vecd does"


def _read_info(info: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    models = info.get("models") or [{**info, "id": info["model"]["id"]}]
    return {
        str(model["id"]).lower(): {
            # Servers that do not say have loaded all their models at the start.
            "state": str(model.get("state") or ("unavailable" if model.get("unavailable") else "ready")),
            "bytes": model["bytes"] if isinstance(model.get("bytes"), int) else None,
            "loads": model["loads"] if isinstance(model.get("loads"), int) else None,
        }
        for model in models
    }


# --- the table ------------------------------------------------------------------------------------------------------


def _render(report: Mapping[str, Any]) -> list[str]:
    models = report["models"]
    has_states = any(model["state"] for model in models)
    headings = ["name", "aliases", "kind", "source", "load", "weight", "keep alive", "memory"]
    rows = [headings + ["state", "in use", "loads"] * has_states]
    for model in models:
        expected = model["expected_bytes"]
        row = [
            model["name"],
            ", ".join(model["aliases"]) or "-",
            model["kind"] or "?",
            model["source"],
            model["load"] + (", pinned" if model["pinned"] else ""),
            f"{model['weight']:g}",
            "for ever" if model["keep_alive_s"] is None else f"{model['keep_alive_s']:g} s",
            "?" if expected is None else ("" if model["is_measured"] else "about ") + in_mb(expected),
        ]
        if has_states:
            nbytes, loads = model["bytes"], model["loads"]
            row += [
                model["state"] or "not there",
                in_mb(nbytes) if nbytes else "-",
                "-" if loads is None else str(loads),
            ]
        rows.append(row)
    lines = as_table(rows)
    if report["server_bytes"] is not None:
        budget = report["budget_bytes"]
        of_budget = "" if budget is None else f"; the budget is {in_mb(budget)}"
        lines.append(f"the server itself: about {in_mb(report['server_bytes'])}{of_budget}")
    lines += [f"{model['name']}: {model['problem']}" for model in models if model["problem"]]
    lines += report["problems"]
    if report["error"]:
        lines.append(f"{report['url']} {report['error']}")
    return lines
