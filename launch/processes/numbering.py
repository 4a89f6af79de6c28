"""The indices of the models and of the workers of a new configuration.

Owns the rule: a model that is served already keeps its index, and its workers keep theirs as long as there is room for
them before the next model's; everything else gets what is free. Shared metrics have a fixed number of cells for each.
Pure. Called by `vecd.launch.processes.reload`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from vecd.gateway.types.config import GatewayConfig
from vecd.launch.base.exit_codes import ConfigurationError


def numbered(new: Sequence[GatewayConfig], served: Mapping[str, GatewayConfig]) -> list[GatewayConfig]:
    """The configurations of all models, in the same order, with indices that fit to those of the models that are served
    now, of which there is one at least.

    The indices of a removed model are free at once: no incarnation of a worker comes twice. A new model's index is
    above those of the models that stay, while there are such, because defaults are chosen in this order. Raises
    ConfigurationError for more models or workers than there are cells for.
    """
    room = next(iter(served.values()))
    board_models, board_workers = room.board_models, room.board_workers
    if len(new) > board_models:
        raise ConfigurationError([f"models: {len(new)} given, at most {board_models} without a restart"])
    staying = {config.model: served[config.model] for config in new if config.model in served}
    models = {model: before.model_index for model, before in staying.items()}
    workers: dict[str, range] = {}
    # First those that need nothing more, then those that have a place already, then the others.
    for config in sorted(new, key=lambda config: _growth(config, staying.get(config.model))):
        before = staying.get(config.model)
        if before is None:
            above = max(models.values(), default=-1) + 1
            free = (index for index in (*range(above, board_models), *range(above)) if index not in models.values())
            models[config.model] = next(free)
        start = _start(
            config.num_workers, workers.values(), board_workers, 0 if before is None else before.first_worker
        )
        if start is None:
            of = f" of {config.model}" if len(new) > 1 else ""
            most = max(map(len, _gaps(workers.values(), board_workers)))
            raise ConfigurationError([f"workers{of}: {config.num_workers} given, at most {most} without a restart"])
        workers[config.model] = range(start, start + config.num_workers)
    return [
        replace(
            config,
            board_models=board_models,
            board_workers=board_workers,
            model_index=models[config.model],
            first_worker=workers[config.model].start,
        )
        for config in new
    ]


def _growth(config: GatewayConfig, before: GatewayConfig | None) -> int:
    """0 for a model that needs no more workers than it has, 1 for one that does, 2 for one that is new."""
    return 2 if before is None else int(config.num_workers > before.num_workers)


def _start(num: int, taken: Iterable[range], size: int, wanted: int) -> int | None:
    """Where `num` indices in a row are free: at `wanted` if that is possible, or as far down as it is."""
    gaps = [gap for gap in _gaps(taken, size) if len(gap) >= num]
    if any(gap.start <= wanted and wanted + num <= gap.stop for gap in gaps):
        return wanted
    return gaps[0].start if gaps else None


def _gaps(taken: Iterable[range], size: int) -> list[range]:
    """What is free of 0 … size - 1, in order; some may be empty."""
    bounds = [0, *(bound for part in sorted(taken, key=lambda part: part.start) for bound in (part.start, part.stop))]
    return [range(start, stop) for start, stop in zip(bounds[::2], [*bounds[1::2], size], strict=True)]
