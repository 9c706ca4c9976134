"""``prfaas plan``: the throughput model and planner, and the tables of the paper it rests on."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core import ScenarioError
from harness.verbs.output import check_output_file
from harness.verbs.scenario import add_scenario, chosen_scenario

if TYPE_CHECKING:
    from harness.planning.catalogue import Catalogue

Rows = tuple[list[dict[str, Any]], Callable[[Sequence[dict[str, Any]]], None]]


def add(verbs: Any) -> None:  # argparse publishes no name for what add_subparsers gives
    """The verb and its options."""
    parser = verbs.add_parser(
        "plan",
        help="search threshold and splits, and say what they carry, cost and leave out",
        description="Solves every deployment of a scenario, or prints one of the paper's tables "
        "recomputed from the shipped profiles.",
    )
    add_scenario(parser, optional=True)
    parser.add_argument(
        "--objective",
        choices=("paper", "exact"),
        default="paper",
        help="maximise Lambda_max with T(E[l]) as the paper does (default) or with E[T(l)]",
    )
    parser.add_argument(
        "--keep-plan",
        action="store_true",
        help="keep the scenario's threshold and splits, as simulate and bench do",
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a report of the plan, one offline file"
    )
    parser.add_argument(
        "--emit-scenario",
        type=Path,
        metavar="FILE",
        help="write the scenario with the plan found, its --set values and where its costs are "
        "from; a new file",
    )
    parser.add_argument(
        "--table",
        choices=tuple(TABLES),
        help="phi: Table 3 and the operator model beside it; reduction: what shrinks a model's "
        "KV; wall: what N GPUs would send. Without a scenario",
    )
    parser.add_argument(
        "--profiles",
        type=Path,
        default=Path("profiles"),
        metavar="DIR",
        help="the folder of shipped profiles (default: profiles)",
    )
    parser.set_defaults(call=_plan)


def _plan(options: argparse.Namespace) -> int:
    if options.table is not None:
        return _table(options)
    if options.scenario is None:
        raise ScenarioError("prfaas plan needs a SCENARIO, or --table for one of the paper's.")
    if options.html is not None:
        check_output_file(options.html, "--html")
    if options.emit_scenario is not None:
        _check_emit(options)
    from harness.planning.plan import plan

    scenario = chosen_scenario(options)
    found = plan(scenario, options.objective, keep=options.keep_plan)
    if options.emit_scenario is not None:
        from harness.scenario_text import emit_plan

        emit_plan(found, _settings(options), options.emit_scenario)
    document = found.document()
    document["bandwidth_wall"] = _bandwidth_wall(options.profiles, document["notes"])
    if options.html is not None:
        from harness.planning.report import write_plan_report

        write_plan_report(document, options.html)
    if options.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        from harness.planning.console import print_plan

        print_plan(document)
    if options.html is not None:
        print(f"report: {options.html}", file=sys.stderr if options.json else sys.stdout)
    if options.emit_scenario is not None:
        print(f"scenario: {options.emit_scenario}", file=sys.stderr)
    return 0


def _check_emit(options: argparse.Namespace) -> None:
    check_output_file(options.emit_scenario, "--emit-scenario", kept="name a new file")
    if options.trace is not None:
        raise ScenarioError(
            "--emit-scenario writes the scenario's own workload; give the trace as --set "
            "workload.trace=PATH in place of --trace."
        )


def _settings(options: argparse.Namespace) -> list[str]:
    """All that was laid over the file."""
    more = [] if options.duration is None else [f'load.duration="{options.duration}"']
    return [*options.set, *more]


def _bandwidth_wall(folder: Path, notes: list[str]) -> dict[str, Any] | None:
    """Egress by model, where there is a folder of profiles; a note says that there is none."""
    from harness.planning.phi import bandwidth_wall

    try:
        catalogue = _catalogue(folder)
    except ScenarioError as error:
        notes.append(f"bandwidth_wall is left out: {error}")
        return None
    return {"rows": [asdict(row) for row in bandwidth_wall(catalogue)]}


def _catalogue(folder: Path) -> "Catalogue":
    """The shipped profiles; those that cannot be used are named on stderr."""
    from harness.planning.catalogue import read_catalogue

    catalogue = read_catalogue(folder)
    for reason in catalogue.skipped:
        print(f"prfaas: skipped: {reason}", file=sys.stderr)
    return catalogue


def _table(options: argparse.Namespace) -> int:
    given = (
        options.scenario,
        options.trace,
        options.duration,
        options.html,
        options.emit_scenario,
    )
    if options.set or options.keep_plan or any(one is not None for one in given):
        raise ScenarioError(
            f"--table {options.table} is recomputed from the profiles in --profiles alone; it "
            "takes no scenario, --set, --trace, --duration, --keep-plan, --html or "
            "--emit-scenario."
        )
    rows, show = TABLES[options.table](_catalogue(options.profiles))
    if options.json:
        document = {"table": options.table, "rows": rows}
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        show(rows)
    return 0


def _phi(catalogue: "Catalogue") -> Rows:
    from harness.planning.paper_tables import print_phi
    from harness.planning.phi import phi_table

    return [asdict(row) for row in phi_table(catalogue)], print_phi


def _reduction(catalogue: "Catalogue") -> Rows:
    from harness.planning.paper_tables import print_reduction
    from harness.planning.reduction import reductions

    rows = reductions(catalogue.architectures.values())
    return [asdict(row) for row in rows], print_reduction


def _wall(catalogue: "Catalogue") -> Rows:
    from harness.planning.paper_tables import print_wall
    from harness.planning.phi import bandwidth_wall

    return [asdict(row) for row in bandwidth_wall(catalogue)], print_wall


#: What --table can print: rows for JSON and how to show them.
TABLES = {"phi": _phi, "reduction": _reduction, "wall": _wall}
