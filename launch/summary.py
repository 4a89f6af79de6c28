"""What the operator reads when the server is ready. Pure."""

import os
import re
from collections.abc import Iterator, Sequence
from shlex import quote

from vecd.base.files import JsonObject
from vecd.launch.config.plan import Plan
from vecd.model.card import ModelCard

_ON_DEMAND = "loaded on demand"
_MAX_LABELS, _MAX_LABEL_CHARS = 5, 32


def summary(
    plan: Plan,
    url: str,
    admin_url: str,
    facts: JsonObject | None,
    memory_mb: int,
    ready_s: float,
    others: Sequence[tuple[Plan, JsonObject | None]] = (),
) -> tuple[list[str], JsonObject]:
    """What was started and a line to try it with, as text; and the same for programs, as docs/logs.md has it. `facts`
    are those of one of the model's workers; a model that is loaded on demand has none yet."""
    fields = {
        "event": "ready",
        "version": plan.gateway.version,
        **_fields_of(plan, facts),
        "gateways": plan.gateway.gateways,
        "memory_mb": memory_mb,
        "url": url,
        "admin_url": admin_url or None,
        "ready_s": round(ready_s, 3),
        "pid": os.getpid(),
    }
    models = [(plan, facts), *others]
    if others:
        fields["models"] = [_fields_of(*model) for model in models]

    card, gateway, settings = plan.card, plan.gateway, plan.settings
    of_vectors = f"{card.default_dim} dimensions, " if "dense" in card.capabilities else ""
    of_pooling = f", {card.pooling_of_output} pooling" if card.pooling_of_output else ""
    if "dense" in card.capabilities and card.is_normalized:
        of_pooling += ", normalized"
    engine = _ON_DEMAND
    if facts is not None:
        parity = facts.get("agreement", {})
        agrees = ", not compared with the reference model" if parity is None else ""
        if parity:
            agrees = f", within {parity['max_abs_diff']:.1e} of the reference model in {parity['compared_with']}"
        engine = f"{facts.get('path')}, {facts.get('dtype')}{agrees}"
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
    num_gateways = gateway.gateways
    gateways = f", {num_gateways} gateways" if num_gateways > 1 else ""
    about_model = [
        f"  model      {gateway.model}: {of_vectors}at most {gateway.max_tokens} tokens{of_pooling}",
        f"  kind       {', '.join(card.capabilities)}{_labels_of(card)}",
        *_about_tokens(card),
        f"  engine     {engine}",
        f"  workers    {len(plan.workers)} × {threads} thread(s) on {device}{gateways}",
    ]
    lines = [
        f"vecd {gateway.version} is ready",
        *([*map(_line_of, models), f"  gateways   {num_gateways}"] if others else about_model),
        *(f"  assumed    {each.gateway.model}: {said}" for each, _ in models if (said := each.card.assumption)),
        f"  memory     {memory_mb} MB in all",
        f"  listening  {url}",
        *([f"  admin      {admin_url}"] if admin_url else []),
        f"  try        {curl}{url_here}{path_to_try}{key} -H 'content-type: application/json' -d '{body}'",
        f"  ready in   {ready_s:.1f} s",
    ]
    return lines, fields


def _fields_of(plan: Plan, facts: JsonObject | None) -> JsonObject:
    facts = facts or {}
    return {
        "model": plan.gateway.model,
        "capabilities": list(plan.card.capabilities),
        "dimensions": plan.card.default_dim if "dense" in plan.card.capabilities else None,
        "labels": plan.card.num_labels or None,
        "max_tokens": plan.gateway.max_tokens,
        "engine": facts.get("path"),
        "dtype": facts.get("dtype"),
        "workers": len(plan.workers),
    }


def _line_of(model: tuple[Plan, JsonObject | None]) -> str:
    fields = _fields_of(*model)
    dimensions = f"{fields['dimensions']} dimensions, " if fields["dimensions"] else ""
    workers = f"{fields['workers']} worker{'s' if fields['workers'] > 1 else ''}"
    engine = _ON_DEMAND if model[1] is None else f"{fields['engine']}, {fields['dtype']}"
    return (
        f"  model      {fields['model']}: {', '.join(fields['capabilities'])}, {dimensions}at most "
        f"{fields['max_tokens']} tokens, {engine}, {workers}"
    )


def _labels_of(card: ModelCard) -> str:
    """How many labels there are, and the first of them; the name of a single one says nothing."""
    if card.score is None or card.num_labels == 1:
        return " (1 label)" if card.num_labels else ""
    names = [name if name.isprintable() else repr(name) for name in card.score.labels[:_MAX_LABELS]]
    more = f" and {card.num_labels - _MAX_LABELS} more" if card.num_labels > _MAX_LABELS else ""
    return f" ({card.num_labels} labels: {', '.join(name[:_MAX_LABEL_CHARS] for name in names)}{more})"


def _about_tokens(card: ModelCard) -> Iterator[str]:
    if card.tokens is not None:
        cuts = (("documents", card.tokens.document_tokens), ("queries", card.tokens.query_tokens))
        lengths = [f"{what} of {most} tokens" for what, most in cuts if most]
        at_most = f", with {' and '.join(lengths)} at most" if lengths else ""
        yield f"  tokens     {card.token_dim} dimensions each{at_most}"


def _to_try(capabilities: Sequence[str], model: str) -> tuple[str, str]:
    if "dense" in capabilities:
        return "/v1/embeddings", f'{{"model": "{model}", "input": "Hello, world"}}'
    if "rerank" in capabilities or "multi-vector" in capabilities:
        return "/rerank", f'{{"model": "{model}", "query": "Who is there?", "documents": ["Nobody.", "The postman."]}}'
    return "/embed_sparse" if "sparse" in capabilities else "/predict", '{"inputs": "Hello, world"}'
