"""The modules that the fork server, or the zygote before it, imports so that workers need not.

Owns the lists. Imports nothing large, because the supervisor calls it and must stay small.
"""

from vecd.workers.families.encoders import FUSED_FAMILIES

ENGINES_WITHOUT_TORCH = {
    "lean": "vecd.workers.engines.lean.engine",
    "export": "vecd.workers.engines.lean.engine",
    "static": "vecd.workers.engines.static",
}
"""By the path of an engine: its module."""


def modules_to_preload(model_type: str, engine: str) -> list[str]:
    """The modules whose import takes most of a worker's start, for a model of this type, in the order to import them.
    They are for the engines that need torch.

    Some may not exist in the installed versions; the fork server skips those. Measured on 2 cores: torch 1.5 s,
    transformers 2 s more, which a family with a fused path does not need.
    """
    torch_alone = ["torch", "safetensors.torch", "vecd.workers.engines.torch.build"]
    if engine in ("auto", "lean", "fused") and model_type in FUSED_FAMILIES:
        return torch_alone
    # transformers' rule; a text model that is part of a larger one lives in the larger one's module.
    family = model_type.replace("-", "_").removesuffix("_text")
    return [
        *torch_alone,
        "transformers",
        f"transformers.models.{family}.modeling_{family}",
        "vecd.workers.engines.torch.packed",
    ]
