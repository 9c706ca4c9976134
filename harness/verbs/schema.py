"""``prfaas schema``: the JSON Schema of a scenario, for editors."""

import argparse
import json
from typing import Any


def add(verbs: Any) -> None:  # argparse publishes no name for what add_subparsers gives
    """The verb; it has no options."""
    parser = verbs.add_parser("schema", help="print the JSON Schema of a scenario, for editors")
    parser.set_defaults(call=_schema)


def _schema(_options: argparse.Namespace) -> int:
    from harness.scenario_schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0
