"""Which modules the fork server imports, so that a worker need not.

Owns the list. Imports nothing heavy, because the supervisor, who must stay small, calls it.
"""

from vecd.workers.families.encoders import FAMILIES


def modules_to_preload(model_type: str, engine: str) -> list[str]:
    """The modules whose import makes up nearly all of a worker's start, for a model of this type.

    Some may not exist in the installed versions: the fork server imports what it can, in this order. Measured on
    2 cores: torch 1.5 s, transformers 2 s more, which a family with a fused path does without.
    """
    torch_alone = ["torch", "safetensors.torch", "vecd.workers.engines.load"]
    if engine in ("auto", "fused") and model_type in FAMILIES:
        return torch_alone
    # transformers' rule; a text model that is part of a larger one lives in the larger one's module.
    family = model_type.replace("-", "_").removesuffix("_text")
    return [
        *torch_alone,
        "transformers",
        f"transformers.models.{family}.modeling_{family}",
        "vecd.workers.engines.torch.packed",
    ]
