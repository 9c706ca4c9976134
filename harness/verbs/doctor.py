"""``prfaas doctor``: what this machine has for a testbed, what it lacks and how to get it."""

import argparse
from typing import Any


def add(verbs: Any) -> None:  # argparse publishes no name for what add_subparsers gives
    """The verb and its option."""
    parser = verbs.add_parser("doctor", help="say what this machine can run, and what it lacks")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.set_defaults(call=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    from netem.doctor import examine, print_examination

    examination = examine()
    print_examination(examination, as_json=options.json)
    return 1 if examination.backend is None else 0
