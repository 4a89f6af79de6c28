"""Checkpoints whose weights are pickles alone, as torch saves them. Imports torch."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def pickled(folder: Path, num_shards: int = 1) -> Path:
    """Put a pickle in the place of each safetensors file of the model in `folder`. Its own weights, not those of its
    modules or heads, are cut into `num_shards`. Returns `folder`."""
    for path in sorted(folder.rglob("*.safetensors")):
        weights = load_file(path)
        path.unlink()
        if path.name != "model.safetensors":
            torch.save(weights, path.with_suffix(".pt"))
        elif path.parent != folder or num_shards == 1:
            torch.save(weights, path.with_name("pytorch_model.bin"))
        else:
            places = {name: f"pytorch_model-{1 + at % num_shards}.bin" for at, name in enumerate(weights)}
            for place in set(places.values()):
                torch.save({name: weights[name] for name in weights if places[name] == place}, folder / place)
            (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    return folder
