"""Whether the models of a configuration fit into `--memory-budget`, and the table that says so.

Owns the rule: models that are loaded at the start must fit together; one that is loaded on demand must fit beside those
that are never unloaded for it. Called by `vecd.supervisor` at the start and at a reload, and by `vecd models`.
"""

from collections.abc import Sequence

from vecd.launch.base.exit_codes import ConfigurationError
from vecd.launch.config.memory_budget import read_memory_budget
from vecd.launch.config.plan import Plan
from vecd.launch.config.settings import Settings
from vecd.launch.memory.book import MemoryBook
from vecd.launch.memory.footprint import predict_server
from vecd.workers.memory import memory_limit_mb


def make_book(plans: Sequence[Plan]) -> MemoryBook:
    """The book for the models of one configuration, whose budget they fit into. `plans`: of all of them, one at least.
    Reads the file system: not for an event loop.

    Raises ConfigurationError, with a table of who needs what, for models that do not fit, and for a share of a memory
    whose size is not known. Side effect: closes the plans then.
    """
    try:
        book = read_book(plans)
        if problems := why_too_much(plans, book):
            raise ConfigurationError([*problems, *_needs(plans, book)])
    except BaseException:
        for plan in plans:
            plan.close()
        raise
    return book


def read_book(plans: Sequence[Plan]) -> MemoryBook:
    """As `make_book`, for models that need not fit."""
    settings = plans[0].settings
    return MemoryBook(_budget_of(settings), settings.cache_folder, predict_server(plans), is_only_model=len(plans) == 1)


def in_mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.0f} MB"


def as_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines, whose columns are as wide as the widest cell. `rows`: of equal length, the first has the headings."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _budget_of(settings: Settings) -> int | None:
    """Raises ConfigurationError."""
    if not settings.memory_budget:
        return None
    memory_mb = memory_limit_mb()
    if settings.memory_budget.rstrip().endswith("%") and not memory_mb:
        raise ConfigurationError(
            [f"--memory-budget: {settings.memory_budget} given, but the system does not say of how much; give bytes"]
        )
    return read_memory_budget(settings.memory_budget, memory_mb << 20)


def why_too_much(plans: Sequence[Plan], book: MemoryBook) -> list[str]:
    """Lines for the operator; none for models that fit. Without a budget nothing is read."""
    if book.budget is None:
        return []
    totals = {plan.gateway.model: book.expect(plan).total for plan in plans}
    pinned = [plan.gateway for plan in plans if plan.gateway.is_pinned]
    at_start = [plan.gateway for plan in plans if not plan.gateway.loads_on_demand]
    kept = book.server_nbytes + sum(totals[config.model] for config in pinned)
    needs = [("the models that are loaded at the start", sum(totals[each.model] for each in at_start))] * bool(at_start)
    needs = [(what, nbytes + book.server_nbytes) for what, nbytes in needs]
    needs += [("the pinned models", kept)] * bool(pinned)
    needs += [
        (config.model, kept + totals[config.model])
        for config in (plan.gateway for plan in plans)
        if config.loads_on_demand and not config.is_pinned
    ]
    too_much = [(what, nbytes) for what, nbytes in needs if nbytes > book.budget]
    if not too_much:
        return []
    given = plans[0].settings.memory_budget
    return [
        f"--memory-budget: {given} given, which is {in_mb(book.budget)}: {what} would need {in_mb(nbytes)} with the "
        "server itself" + (" and the pinned models" if pinned and what in totals else "")
        for what, nbytes in too_much
    ]


def _needs(plans: Sequence[Plan], book: MemoryBook) -> list[str]:
    """A table of who needs what."""
    rows = [["model", "load", "memory", "pinned", "known by"]]
    rows += [
        [
            plan.gateway.model,
            plan.settings.load,
            in_mb(book.expect(plan).total),
            "yes" if plan.gateway.is_pinned else "no",
            "measurement" if book.recall(plan) else "prediction",
        ]
        for plan in plans
    ]
    rows.append(["(the server itself)", "start", in_mb(book.server_nbytes), "yes", "prediction"])
    return as_table(rows)
