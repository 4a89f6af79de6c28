"""The models of the configuration: which there are, in what order, and the settings of each.

Owns `ModelEntry`. The settings of a model are the server's, with what its table or its argument says over them, so that
`vecd.launch.config.plan` plans it as it plans the model of a server of one. Called by `vecd.supervisor`, and by
`vecd.launch.processes.reload`.
"""

from dataclasses import dataclass
from typing import Literal

from vecd.launch.config.settings import Settings


@dataclass(frozen=True, slots=True)
class ModelEntry:
    name: str
    """By which requests, metrics and logs name it; "" for the name that its folder or its id gives."""
    settings: Settings
    aliases: tuple[str, ...] = ()
    load: Literal["start", "demand"] = "start"
    weight: float = 1.0
    """Its share of the cores while other models need them, too."""


def load_models(settings: Settings) -> tuple[ModelEntry, ...]:
    """In the order of the configuration, one at least. Raises ConfigurationError with every problem."""
    return (ModelEntry(settings.served_model_name, settings),)
