"""What the operator reads when the server is ready. Pure."""

import os
import re
from collections.abc import Sequence
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
        "capabilities": list(plan.card.capabilities),
        "dimensions": plan.card.dim if "dense" in plan.card.capabilities else None,
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
    of_vectors = of_pooling = ""
    if "dense" in card.capabilities:
        of_vectors = f"{card.dim} dimensions, "
        of_pooling = f", {'+'.join(card.pooling)} pooling{', normalized' if card.is_normalized else ''}"
    labels = ""
    if card.score is not None:
        labels = f" ({card.num_labels} label{'s' if card.num_labels > 1 else ''})"
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
    path_to_try, body = _to_try(card.capabilities, gateway.model)
    num_gateways = gateway.num_gateways
    gateways = f", {num_gateways} gateways" if num_gateways > 1 else ""
    if plan.why_gateways:
        gateways = f", {num_gateways} gateway{'s' if num_gateways > 1 else ''} ({plan.why_gateways})"
    lines = [
        f"vecd {gateway.version} is ready",
        f"  model      {gateway.model}: {of_vectors}at most {gateway.max_tokens} tokens{of_pooling}",
        f"  kind       {', '.join(card.capabilities)}{labels}",
        f"  engine     {facts.get('path')}, {facts.get('dtype')}{agrees}",
        f"  workers    {len(plan.workers)} × {threads} thread(s) on {device}{gateways}",
        f"  memory     {memory_mb} MB in all",
        f"  listening  {url}",
        *([f"  admin      {admin_url}"] if admin_url else []),
        f"  try        {curl}{url_here}{path_to_try}{key} -H 'content-type: application/json' -d '{body}'",
        f"  ready in   {ready_s:.1f} s",
    ]
    return lines, fields


def _to_try(capabilities: Sequence[str], model: str) -> tuple[str, str]:
    """The path and the body of a request that the model can answer."""
    if "dense" in capabilities:
        return "/v1/embeddings", f'{{"model": "{model}", "input": "Hello, world"}}'
    if "rerank" in capabilities or "multi-vector" in capabilities:
        return "/rerank", f'{{"model": "{model}", "query": "Who is there?", "documents": ["Nobody.", "The postman."]}}'
    return "/embed_sparse" if "sparse" in capabilities else "/predict", '{"inputs": "Hello, world"}'
