"""What the operator reads when the server is ready. Pure."""

import os
import re
from shlex import quote
from typing import Any

from vecd.launch.config.plan import Plan


def summary(
    plan: Plan, url: str, admin_url: str, facts: dict[str, Any], memory_mb: int, ready_s: float
) -> tuple[list[str], dict[str, Any]]:
    """What was started and a line to try it with, as text; and the same for programs, as docs/logs.md has it."""
    fields = {
        "event": "ready",
        "version": plan.gateway.version,
        "model": plan.gateway.model,
        "dimensions": plan.card.dim,
        "max_tokens": plan.gateway.max_tokens,
        "engine": facts.get("path"),
        "dtype": facts.get("dtype"),
        "workers": len(plan.workers),
        "gateways": plan.gateway.num_gateways,
        "memory_mb": memory_mb,
        "url": url,
        "admin_url": admin_url or None,
        "ready_s": round(ready_s, 3),
        "pid": os.getpid(),
    }

    card, gateway, settings = plan.card, plan.gateway, plan.settings
    normalized = ", normalized" if any(step.kind == "normalize" for step in card.steps) else ""
    parity = facts.get("agreement", {})
    agrees = ", not compared with the plain model"
    if parity is not None:
        agrees = f", within {parity['max_abs_diff']:.1e} of the plain model" if parity else ""
    worker = plan.workers[0]
    device = worker.device.partition(":")[0]
    threads = f"1 to {worker.max_threads}" if worker.max_threads > 1 else worker.num_threads
    url_here = re.sub(r"//(0\.0\.0\.0|\[::\])", "//127.0.0.1", url)
    path = url.removeprefix("unix:")
    is_tls = settings.tls_cert is not None
    curl = f"curl --cacert {quote(str(settings.tls_cert))} " if is_tls else "curl "
    if path != url:
        url_here = f"--unix-socket {quote(path)} http{'s' if is_tls else ''}://localhost"
    key = ' -H "authorization: Bearer $VECD_API_KEY"' if gateway.keys else ""
    num_gateways = gateway.num_gateways
    gateways = f", {num_gateways} gateways" if num_gateways > 1 else ""
    if plan.why_gateways:
        gateways = f", {num_gateways} gateway{'s' if num_gateways > 1 else ''} ({plan.why_gateways})"
    lines = [
        f"vecd {gateway.version} is ready",
        f"  model      {gateway.model}: {card.dim} dimensions, at most {gateway.max_tokens} tokens, "
        f"{'+'.join(card.pooling)} pooling{normalized}",
        f"  engine     {facts.get('path')}, {facts.get('dtype')}{agrees}",
        f"  workers    {len(plan.workers)} × {threads} thread(s) on {device}{gateways}",
        f"  memory     {memory_mb} MB in all",
        f"  listening  {url}",
        *([f"  admin      {admin_url}"] if admin_url else []),
        f"  try        {curl}{url_here}/v1/embeddings{key} -H 'content-type: application/json' "
        f"""-d '{{"model": "{gateway.model}", "input": "Hello, world"}}'""",
        f"  ready in   {ready_s:.1f} s",
    ]
    return lines, fields
