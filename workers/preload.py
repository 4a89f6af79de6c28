"""Which modules the fork server imports, so that a worker need not.

Owns the list. Imports nothing, because the supervisor, who must stay small, calls it.
"""


def modules_to_preload(model_type: str) -> list[str]:
    """The modules whose import makes up nearly all of a worker's start, for a model of this type.

    Some may not exist in the installed versions: the fork server imports what it can, in this order. Measured on
    2 busy cores: 3.3 s for BERT, once, and nothing is left for a worker to import.
    """
    # transformers' rule; a text model that is part of a larger one lives in the larger one's module.
    family = model_type.replace("-", "_").removesuffix("_text")
    return [
        "torch",
        "safetensors.torch",
        "transformers",
        f"transformers.models.{family}.modeling_{family}",
        "workers.engines.choice",
    ]
