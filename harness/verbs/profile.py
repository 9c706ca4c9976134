"""``prfaas profile``: measure what an engine costs; ``show`` and ``import`` profile files."""

import argparse
from pathlib import Path
from typing import Any

from harness.verbs.profile_import import add_import, print_profile
from harness.verbs.profile_matrix import add_matrix
from harness.verbs.profile_measure import add_measure


def add(verbs: Any) -> None:  # argparse publishes no name for what add_subparsers gives
    """The verb, ``show``, the importers, and measuring where no action is named."""
    parser = verbs.add_parser(
        "profile",
        help="measure, import and show the costs of an engine",
        description="Without an action: measure an engine, at --url, as a pair or emulated.",
    )
    add_measure(parser)
    actions = parser.add_subparsers(metavar="ACTION")
    shown = actions.add_parser("show", help="range, provenance and decode side of a profile file")
    shown.add_argument("file", type=Path, metavar="FILE")
    shown.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    shown.set_defaults(call=_show)
    add_import(actions)
    add_matrix(actions)


def _show(options: argparse.Namespace) -> int:
    print_profile(options.file, None, as_json=options.json)
    return 0
