"""``prfaas bench`` and ``prfaas simulate``: one schedule, live or in simulated time."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.verbs.output import check_output_folder
from harness.verbs.report import print_verdict
from harness.verbs.scenario import add_scenario, chosen_scenario

if TYPE_CHECKING:
    from harness.preparation import Prepared


def add(verbs: Any) -> None:  # argparse publishes no name for what add_subparsers gives
    """Both verbs and their options."""
    live = verbs.add_parser("bench", help="run the deployments of a scenario live")
    add_scenario(live)
    _add_keep_plan(live)
    live.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="where run directories go"
    )
    live.add_argument(
        "--repeats",
        type=count,
        default=1,
        metavar="N",
        help="run each deployment N times in interleaved order (default 1)",
    )
    live.set_defaults(call=_bench)
    simulated = verbs.add_parser("simulate", help="simulate the deployments of a scenario")
    add_scenario(simulated)
    _add_keep_plan(simulated)
    simulated.set_defaults(call=_simulate)


def count(text: str) -> int:
    """A number of repeats; argparse puts this function's name into its message."""
    value = int(text)
    if not 1 <= value <= 100:
        raise argparse.ArgumentTypeError("must be from 1 to 100")
    return value


def _add_keep_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--keep-plan",
        action="store_true",
        help="keep the scenario's threshold and splits with --trace",
    )


def _prepared(options: argparse.Namespace, *, live: bool) -> "Prepared":
    """The scenario that the options describe, scheduled, modelled and simulated."""
    from harness.gateway.prompts import load_tokenizer
    from harness.preparation import prepare, replan
    from harness.scenario import check_emulation

    scenario = chosen_scenario(options)
    if live:
        check_emulation(scenario)
        if scenario.gateway.tokenizer is not None:
            load_tokenizer(str(scenario.gateway.tokenizer))
    notes: tuple[str, ...] = ()
    if options.trace is not None and not options.keep_plan:
        scenario, notes = replan(scenario)
    return prepare(scenario, notes)


def _bench(options: argparse.Namespace) -> int:
    from harness.bench import bench
    from harness.console import RunConsole

    check_output_folder(options.runs, "--runs")
    with RunConsole() as console:
        prepared = _prepared(options, live=True)
        for note in prepared.notes:
            console.say(note)
        result = bench(prepared, options.runs, options.repeats, console.say, console.progress)
    print_verdict(result.run, as_json=options.json)
    if result.error is not None:
        print(f"prfaas: {result.error}", file=sys.stderr)
    return result.exit_status


def _simulate(options: argparse.Namespace) -> int:
    from harness.console import simulation_table
    from harness.simulation_summary import simulation_document

    document = simulation_document(_prepared(options, live=False))
    for note in document["notes"]:
        print(note, file=sys.stderr)
    if options.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        from rich.console import Console

        Console().print(simulation_table(document))
    return 0
