"""LiteLLM's proxy in a process of its own, and an OpenAI client that talks to it."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
from serve import rows, serve

MODEL = "all-MiniLM-L6-v2"
_KEY = "sk-the-key-of-the-proxy-0123456789"
_START_TIMEOUT_S = 100.0
_LOG = Path("proxy.log")
"""In the folder that is removed with this process, whose group the proxy dies with."""


def run(code: str) -> list[list[float]]:
    """The configuration of docs/clients.md."""
    vectors: list[list[float]] = embed(start(code), ["Hello, world", "second text"])["vectors"]
    return vectors


def start(config: str) -> str:
    """Start the proxy with a configuration in YAML, wait until it answers, and return its address."""
    Path("config.yaml").write_text(config)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = [sys.executable, "-c", "from litellm import run_server; run_server()"]
    arguments = ["--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    with _LOG.open("wb") as log:
        environment = os.environ | {"LITELLM_MASTER_KEY": _KEY}
        process = subprocess.Popen([*program, *arguments], stdout=log, stderr=log, env=environment)
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return f"http://127.0.0.1:{port}"
    raise RuntimeError(f"the proxy did not start: {_LOG.read_text(errors='replace')[-2000:]}")


def embed(proxy: str, texts: list[str], model: str = MODEL, **fields: Any) -> dict[str, Any]:
    """Vectors by way of the proxy, in openai-python's default format unless `fields` say otherwise."""
    client = openai.OpenAI(base_url=f"{proxy}/v1", api_key=_KEY, max_retries=0)
    answer = client.embeddings.create(model=model, input=texts, **fields)
    return {"vectors": rows(item.embedding for item in answer.data), "tokens": answer.usage.prompt_tokens}


def health(proxy: str) -> dict[str, list[str]]:
    """The models that the proxy finds healthy and unhealthy by a request to each, sorted."""
    request = urllib.request.Request(f"{proxy}/health", headers={"Authorization": f"Bearer {_KEY}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)
    return {state: sorted(item["model"] for item in found[f"{state}_endpoints"]) for state in ("healthy", "unhealthy")}


serve(run, start, embed, health)
