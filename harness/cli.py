"""``prfaas``: one sub-command is one call. Also ``python -m harness``.

Exit status: 0 a supported verdict, 1 the run finished but a gate failed or a claim is not
supported, 2 bad usage or scenario, 3 the testbed could not be built or died.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from harness import __version__
from harness.core import PrfaasError
from harness.verbs import bench, doctor, link, model, plan, profile, report, schema


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; errors that are the user's or the testbed's are one paragraph."""
    options = _parser().parse_args(arguments)
    # A supervisor's SIGTERM and a closed terminal end a run as Ctrl-C does: records kept,
    # everything taken down.
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)
    try:
        status: int = options.call(options)
        if sys.stdout is not None:  # as where it was closed
            sys.stdout.flush()
    except PrfaasError as error:
        print(f"prfaas: {error}", file=sys.stderr)
        return error.exit_status
    except OSError as error:
        where = "standard output" if error.filename is None else error.filename
        print(f"prfaas: cannot read or write {where}: {error.strerror}", file=sys.stderr)
        if error.filename is None:
            # What is left in the buffer cannot be written at the interpreter's end either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PrfaasError.exit_status
    except KeyboardInterrupt:
        print("prfaas: interrupted", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prfaas",
        description="Measures whether LLM prefill can leave the datacenter.",
        epilog="Exit status: 0 supported, 1 not supported, 2 bad usage or scenario, "
        "3 the testbed could not be built or died.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for verb in (bench, doctor, link, model, plan, profile, report, schema):
        verb.add(verbs)
    return parser
