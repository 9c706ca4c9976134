"""``prfaas report``: tables, verdict and report of a run directory, rebuilt."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.record.run_directory import RunDirectory


def add(verbs: Any) -> None:  # argparse publishes no name for what add_subparsers gives
    """The verb and its options."""
    parser = verbs.add_parser("report", help="rebuild tables, verdict and report of a run")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument(
        "--json", action="store_true", help="print the verdict as one JSON document"
    )
    parser.set_defaults(call=_report)


def _report(options: argparse.Namespace) -> int:
    from harness.record.run_directory import RunDirectory
    from harness.record.tables import compact
    from harness.report import write_report
    from harness.verdict import judge

    run = RunDirectory(options.run)
    compact(run)
    verdict = judge(run)
    write_report(run)
    print_verdict(run, as_json=options.json)
    return verdict.exit_status


def print_verdict(run: "RunDirectory", *, as_json: bool) -> None:
    """A run's verdict on stdout: a table for people, or the one JSON document."""
    from rich.console import Console

    from harness.console import verdict_table

    text = run.verdict_path.read_text()
    if as_json:
        print(text, end="")
        return
    document = json.loads(text)
    Console().print(verdict_table(document))
    what = "cut short" if document["verdict"] == "simulated" else "not supported"
    for reason in document["reasons"]:
        print(f"{what}: {reason}")
    print(f"report: {run.report_path}")
