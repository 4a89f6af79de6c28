"""A server of several models with the dummy engine, one for all tests of a run; `every_kind` has one with weights.

Each model is asked below its own path, as `/m/moods`, by which a server of one model is imitated.
"""

import fcntl
import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from tests.support.serving import RunningServer, cache_folder
from tests.support.shared_servers import DUMMY, shared_server

CHAT_TEMPLATE = """{% for m in messages %}{{ cls_token if loop.first }}{{ m.role }}: {{ m.content }}
{% if m.content == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}{{ sep_token }}"""


def shared_folder(name: str, make: Callable[[Path], object]) -> Path:
    """A folder that the first process of a run which asks for it makes."""
    folder = Path(cache_folder(), name)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            folder.mkdir()
            make(folder)
    return folder


def model_of(server: RunningServer, name: str) -> RunningServer:
    """The server, as those see it who ask one of its models."""
    return replace(server, url=f"{server.url}/m/{name}")


@cache
def dummy_models(minilm_folder: Path) -> RunningServer:
    """With the bundled model's tokenizer and sizes: `moods`, which classifies texts, `names`, which classifies tokens,
    `m3` of BGE-M3's kind, and `chat` with a template."""
    folder = shared_folder("dummy-models", partial(_save_dummy_models, minilm_folder))
    return shared_server("--config", str(folder / "vecd.toml"), *DUMMY)


def _save_dummy_models(minilm_folder: Path, folder: Path) -> None:
    for name, kind, labels in (
        ("moods", "BertForSequenceClassification", ("sad", "glad", "mad")),
        ("names", "BertForTokenClassification", ("O", "B-PER", "I-PER", "B-LOC")),
    ):
        _link(minilm_folder, folder / name, ("config.json", "modules.json"))
        config = json.loads((minilm_folder / "config.json").read_text())
        config |= {"architectures": [kind], "id2label": dict(enumerate(labels))}
        (folder / name / "config.json").write_text(json.dumps(config))
    _link(minilm_folder, folder / "m3")
    for head in ("sparse_linear", "colbert_linear"):
        (folder / "m3" / f"{head}.safetensors").touch()
    _link(minilm_folder, folder / "chat")
    (folder / "chat" / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    settings = {"chat": 'overflow = "chunk"\nmax-embed-len = 600\n'}
    tables = [
        f'[models.{name}]\nmodel = "{folder / name}"\n{settings.get(name, "")}'
        for name in ("moods", "names", "m3", "chat")
    ]
    (folder / "vecd.toml").write_text("".join(tables))


def _link(source: Path, folder: Path, but: tuple[str, ...] = ()) -> None:
    folder.mkdir()
    for path in source.iterdir():
        if path.name not in but:
            (folder / path.name).symlink_to(path)
