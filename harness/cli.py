"""``prfaas``: one sub-command is one call. Also ``python -m harness``.

Exit status: 0 a supported verdict, 1 the run finished but a gate failed or a claim is not
supported, 2 bad usage or scenario, 3 the testbed could not be built or died. As a shell counts
signals, 130 after Ctrl-C before there was anything to judge, 141 where who read the output stopped.
"""

import argparse
import os
import select
import signal
import sys
from collections.abc import Sequence

from harness import __version__
from harness.core import PrfaasError
from harness.verbs import (
    bench,
    doctor,
    link,
    model,
    plan,
    profile,
    report,
    schema,
    simulate,
    sweep,
)

INTERRUPTED, STOPPED_READING = 130, 141


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; errors that are the user's or the testbed's are one paragraph."""
    try:
        options = _parser().parse_args(arguments)
        # A supervisor's SIGTERM and a closed terminal end a run as Ctrl-C does: records kept,
        # everything taken down.
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.default_int_handler)
        status: int = options.call(options)
        if sys.stdout is not None:  # as where it was closed
            sys.stdout.flush()
    except PrfaasError as error:
        print(f"prfaas: {error}", file=sys.stderr)
        return error.exit_status
    except OSError as error:
        stopped = isinstance(error, BrokenPipeError) and _reader_is_gone()
        where = "standard output" if error.filename is None else error.filename
        if not stopped:
            print(f"prfaas: cannot read or write {where}: {error.strerror}", file=sys.stderr)
        if error.filename is None:
            # What is left in the buffer cannot be written at the interpreter's end either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return STOPPED_READING if stopped else PrfaasError.exit_status
    except SystemExit as left:
        if isinstance(left.__context__, BrokenPipeError):  # so rich leaves when nobody reads on
            return STOPPED_READING
        raise
    except KeyboardInterrupt:
        print("prfaas: interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


def _reader_is_gone() -> bool:
    """Whether standard output is a pipe that nobody reads from any more, as of ``| head``."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prfaas",
        description="Measures whether LLM prefill can leave the datacenter.",
        epilog="Exit status: 0 supported, 1 not supported, 2 bad usage or scenario, "
        "3 the testbed could not be built or died.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for verb in (bench, doctor, link, model, plan, profile, report, schema, simulate, sweep):
        verb.add(verbs)
    return parser
