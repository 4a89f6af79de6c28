"""`vecd plan`: what it costs to embed many documents with machines like this one.

Owns the order of things: flags, a server, the measurement, the report. Talks only HTTP. Called as `vecd plan` or
`python -m vecd.client.plan.command`.

Exit codes: 0 there is a plan; 1 the server did not start or could not be measured; 2 bad arguments; 130 interrupted.
"""

import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import orjson
import uvloop

from vecd.client.bulk.errors import EmbedError
from vecd.client.bulk.server_process import start_server
from vecd.client.connection import parse_target
from vecd.client.plan import report
from vecd.client.plan.cost import Work, cost_of
from vecd.client.plan.measure import MeasureFailed, Measurement, measure
from vecd.client.plan.options import PlanOptions, parse_options
from vecd.client.status_line import StatusLine

EXIT_OK, EXIT_NOT_MEASURED = 0, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse_options(sys.argv[1:] if argv is None else argv)
    line = StatusLine("vecd plan")
    try:
        measured = _measure(options, line)
    except (EmbedError, MeasureFailed) as error:
        line.say(str(error))
        return EXIT_NOT_MEASURED
    except KeyboardInterrupt:
        line.say("interrupted")
        return 128 + signal.SIGINT
    finally:
        line.clear()
    work = Work(
        num_documents=options.documents,
        num_tokens=options.tokens,
        document_bytes=options.tokens * measured.bytes_per_token,
        dimensions=measured.dimensions,
        dtype=options.output_dtype,
    )
    cost = cost_of(work, measured.documents_per_s, deadline_s=options.deadline_s, num_nodes=options.nodes)
    if options.json:
        print(orjson.dumps(report.fields(work, measured, cost)).decode())
    else:
        print(report.text(work, measured, cost))
    return EXIT_OK


def _measure(options: PlanOptions, line: StatusLine) -> Measurement:
    with ExitStack() as stack:
        target = options.target
        if target is None:
            serving = start_server(options.model, options.serve_flags, lambda text: line.show(lambda: text))
            url, _ = stack.enter_context(serving)
            target = parse_target(url)
        measuring = measure(
            target,
            num_tokens=options.tokens,
            seconds=options.measure_s,
            api_key=options.api_key,
            show=lambda text: line.show(lambda: text),
        )
        return uvloop.run(measuring)


if __name__ == "__main__":
    sys.exit(main())
