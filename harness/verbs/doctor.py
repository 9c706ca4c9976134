"""``prfaas doctor``: what this machine, or a scenario, has and lacks, and how to get it."""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core import ScenarioError

if TYPE_CHECKING:
    from harness.scenario_doctor import ScenarioExamination


def add(verbs: Any) -> None:  # argparse publishes no name for what add_subparsers gives
    """The verb and its options."""
    parser = verbs.add_parser("doctor", help="say what this machine can run, and what it lacks")
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument("--python", metavar="PATH", help="the interpreter that has sglang")
    parser.add_argument(
        "--scenario",
        type=Path,
        metavar="FILE",
        help="check a scenario instead: files, nodes, memory, ports, engine, replication, "
        "profiles; exit status 1 where a run would fail",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="with --scenario: override a key (repeatable)",
    )
    parser.set_defaults(call=_doctor)


def _doctor(options: argparse.Namespace) -> int:
    if options.scenario is not None:
        return _scenario(options)
    if options.set:
        raise ScenarioError("--set goes with --scenario: a machine has no keys.")
    from harness.engine.sglang.doctor import sglang_finding
    from netem.doctor import examine, print_examination

    examination = examine()
    findings = (*examination.findings, sglang_finding(options.python))
    examination = replace(examination, findings=findings)
    print_examination(examination, as_json=options.json)
    return 1 if examination.backend is None else 0


def _scenario(options: argparse.Namespace) -> int:
    from harness.scenario import load_scenario
    from harness.scenario_doctor import examine_scenario

    if options.python is not None:
        raise ScenarioError(
            "--python is of this machine; a scenario names its interpreters itself, by "
            "engine.python and nodes.NAME.python."
        )
    examination = examine_scenario(load_scenario(options.scenario, options.set))
    if options.json:
        print(json.dumps({**asdict(examination), "failed": examination.failed}, indent=2))
    else:
        _print(examination)
    return 1 if examination.failed else 0


def _print(examination: "ScenarioExamination") -> None:
    """A row a finding: what was looked at, how it is, and what that costs."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    table.add_column("checked")
    table.add_column("", no_wrap=True)
    table.add_column("found")
    styles = {"ok": "green", "limited": "yellow", "missing": "red"}
    for one in examination.findings:
        told = one.found
        told += f"\n{one.lacks}" if one.lacks else ""
        told += f"\nto get it: {one.remedy}" if one.remedy else ""
        table.add_row(Text(one.name), Text(one.state, style=styles[one.state]), Text(told))
    Console(highlight=False).print(table)
    count = sum(one.state == "limited" for one in examination.findings)
    print(f"{examination.scenario}: {examination.failed} missing, {count} limited")
