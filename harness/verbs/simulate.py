"""``prfaas simulate``: the deployments of a scenario in simulated time, by the same scheduler."""

import argparse
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.verbs.output import check_output_folder
from harness.verbs.scenario import add_scenario, chosen_scenario
from harness.verbs.simulate_search import add_search, is_search, search

if TYPE_CHECKING:
    from harness.scenario import Scenario
    from harness.simulation_run import SimulationRun
    from harness.simulator import Sink

#: Options that stand for a key of the scenario.
_SHORTHANDS = {
    "load": ("load.rate_req_per_s", float, "RATE", "offered load in requests per second"),
    "cv": ("workload.cv", float, "CV", "coefficient of variation of the gaps"),
    "requests": ("load.num_requests", int, "N", "how many requests"),
    "seed": ("load.seed", int, "SEED", "seed of the schedule"),
}


def add(verbs: Any) -> None:  # argparse publishes no name for what add_subparsers gives
    """The verb and its options."""
    parser = verbs.add_parser("simulate", help="simulate the deployments of a scenario")
    add_scenario(parser)
    for name, (key, kind, metavar, what) in _SHORTHANDS.items():
        parser.add_argument(f"--{name}", type=kind, metavar=metavar, help=f"{what} (--set {key}=)")
    parser.add_argument(
        "--no-transfer",
        action="store_true",
        help="KV moves, and the link is crossed, in no time, as in the paper's Table 6",
    )
    parser.add_argument(
        "--keep-plan",
        action="store_true",
        help="keep the scenario's threshold and splits with --trace",
    )
    parser.add_argument(
        "--runs",
        type=Path,
        metavar="DIR",
        help="write a run directory with requests.parquet, which has a live run's columns",
    )
    add_search(parser)
    parser.set_defaults(call=_simulate)


def _settings(options: argparse.Namespace) -> list[str]:
    given = {key: getattr(options, name) for name, (key, *_) in _SHORTHANDS.items()}
    return [f"{key}={value!r}" for key, value in given.items() if value is not None]


def _simulate(options: argparse.Namespace) -> int:
    from harness.console import simulation_table
    from harness.preparation import prepare, replan
    from harness.simulation_summary import simulation_document

    begun_s = time.monotonic()
    if options.runs is not None:
        check_output_folder(options.runs, "--runs")
    searching = is_search(options)
    options.set += _settings(options)
    scenario = chosen_scenario(options)
    notes: tuple[str, ...] = ()
    if options.trace is not None and not options.keep_plan:
        scenario, notes = replan(scenario)
    if searching:
        return search(options, scenario)
    with ExitStack() as stack:
        run = _run(scenario, options.runs, stack)
        sinks = _nowhere if run is None else run.sink
        prepared = prepare(scenario, notes, transfer=not options.no_transfer, sinks=sinks)
        document = simulation_document(prepared)
        document["wall_s"] = time.monotonic() - begun_s
        if run is not None:
            run.conclude(prepared, document)
    for note in document["notes"]:
        print(note, file=sys.stderr)
    if options.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        from rich.console import Console

        Console().print(simulation_table(document))
    return 0


def _run(scenario: "Scenario", runs: Path | None, stack: ExitStack) -> "SimulationRun | None":
    """The run directory, where one is wanted."""
    if runs is None:
        return None
    from harness.simulation_run import SimulationRun

    run = stack.enter_context(SimulationRun(runs, scenario))
    print(f"run: {run.run.path} (`prfaas report` makes a report of it)", file=sys.stderr)
    return run


def _nowhere(_deployment: str) -> "Sink":
    """Rows that nobody wants once they are counted."""
    return lambda _rows: None
