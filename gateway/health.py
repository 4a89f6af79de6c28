"""What the server says of itself: `/health`, `/live`, `/info`. Reads the gateway's state, changes none of it."""

import os
import time
from typing import TYPE_CHECKING, Any

from gateway.dispatch import WorkerLink

if TYPE_CHECKING:
    from gateway.app import App


def describe_health(app: "App") -> tuple[int, dict[str, Any]]:
    """Status and body of `/health`: 200 only while a worker can serve and the server takes requests."""
    reason = "the server is shutting down" if app.is_draining else app.dispatcher.why_unavailable()
    if reason is None:
        return 200, {"status": "ok"}
    return 503, {"status": "unavailable", "reason": reason}


def describe_info(app: "App") -> dict[str, Any]:
    """The body of `/info`: the model, the limits, the workers and what waits. No text, no key, no path."""
    config, card = app.config, app.config.card
    return {
        "version": config.version,
        "model": {
            "id": config.model,
            "architecture": card.model_type,
            "dimensions": card.dim,
            "max_tokens": config.max_tokens,
            "pooling": "+".join(card.pooling),
            "normalized": any(step.kind == "normalize" for step in card.steps),
            "prompt": card.prompt,
        },
        "limits": {
            "max_inputs": config.max_inputs,
            "max_body_bytes": config.max_body_bytes,
            "max_batch_tokens": config.max_batch_tokens,
            "max_requests": config.max_requests,
            "max_queued_tokens": config.max_queued_tokens,
        },
        "queue": {
            "requests": app.admission.num_requests,
            "sequences": app.scheduler.queued_sequences,
            "tokens": app.scheduler.queued_tokens,
        },
        "workers": [_describe_worker(link) for link in app.dispatcher.links],
        "gateway": {"pid": os.getpid(), "uptime_s": round(time.monotonic() - app.started_at, 1)},
    }


def _describe_worker(link: WorkerLink) -> dict[str, Any]:
    if link.is_stuck:
        state = "stuck"
    elif not link.is_connected:
        state = "connecting"
    else:
        state = "busy" if link.in_flight else "idle"
    return {
        "worker": link.incarnation.worker,
        "life": link.incarnation.life,
        "state": state,
        "batches": link.num_batches,
        **link.facts,
    }
