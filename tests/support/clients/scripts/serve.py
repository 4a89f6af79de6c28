"""Lets a test call functions that use one client library. Runs in that library's environment, with nothing else there.

A line of JSON comes on stdin: {"function", "arguments"}. A line goes to the file descriptor that is the last argument:
{"result"}, or {"error"} with what a caller of the library can see of the exception.
"""

import asyncio
import inspect
import json
import os
import sys
from collections.abc import Callable
from typing import Any

_FIELDS = ("status_code", "status", "code", "param", "type", "request_id", "body")
"""Attributes that libraries give their exceptions."""


def serve(*functions: Callable[..., Any]) -> None:
    """Until stdin ends."""
    by_name = {function.__name__: function for function in functions}
    with os.fdopen(int(sys.argv[-1]), "w", encoding="utf-8") as answers:
        for line in sys.stdin:
            call = json.loads(line)
            try:
                answer = {"result": _run(by_name[call["function"]], call["arguments"])}
            except Exception as error:
                answer = {"error": describe(error)}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def describe(error: BaseException) -> dict[str, Any]:
    fields = {name: getattr(error, name, None) for name in _FIELDS}
    return {
        "classes": [kind.__name__ for kind in type(error).__mro__],
        "message": str(error),
        "fields": {name: value for name, value in fields.items() if isinstance(value, (str, int, dict))},
    }


def rows(vectors: Any) -> list[list[float]]:
    """Vectors as lists of floats, whatever sequence the library gives."""
    return [[float(number) for number in vector] for vector in vectors]


def _run(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    result = function(**arguments)
    return asyncio.run(result) if inspect.iscoroutine(result) else result
