"""What the page at `/` has to know of the server's words."""

import re
from collections.abc import Iterator
from importlib.resources import files

from vecd.gateway.api.registry import DIALECTS
from vecd.gateway.telemetry.shared_metrics import GONE
from vecd.gateway.types.errors import ApiError

PAGE = files("vecd.gateway.api").joinpath("data", "page.html").read_text()


def errors(base: type[ApiError] = ApiError) -> Iterator[type[ApiError]]:
    for error in base.__subclasses__():
        yield error
        yield from errors(error)


def test_the_page_names_every_status_of_an_error():
    [table] = re.findall(r"const STATUSES = \{(.*?)\};", PAGE, re.DOTALL)
    named = {int(status) for status in re.findall(r'(\d+): "', table)}
    of_dialects = {status for dialect in DIALECTS for status in dialect.statuses}
    assert {error.status for error in errors()} | of_dialects | {GONE} <= named
