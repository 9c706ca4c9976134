"""``prfaas bench``: one schedule live, after its model and its simulation."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core import ScenarioError
from harness.verbs.dry_run import add_dry_run, dry_run, refuse_remote
from harness.verbs.output import check_output_folder
from harness.verbs.report import print_verdict
from harness.verbs.scenario import add_scenario, chosen_scenario

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.preparation import Prepared
    from harness.scenario import Scenario


def add(verbs: Any) -> None:  # argparse publishes no name for what add_subparsers gives
    """The verb and its options."""
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
    live.add_argument(
        "--load-processes",
        type=count,
        metavar="N",
        help="share the schedule among N load processes (the same as --set load.workers=N)",
    )
    live.add_argument(
        "--web",
        type=int,
        nargs="?",
        const=0,
        metavar="PORT",
        help="show Locust's web UI on the loopback while load runs (default: any free port)",
    )
    add_dry_run(live)
    live.set_defaults(call=_bench)


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


def _prepared(options: argparse.Namespace) -> "Prepared":
    """The scenario that the options describe, scheduled, modelled and simulated."""
    from harness.gateway.prompts import load_tokenizer
    from harness.preparation import prepare, refuse_several_clusters, replan
    from harness.scenario import check_emulation

    scenario = chosen_scenario(options)
    refuse_several_clusters(scenario)
    check_emulation(scenario)
    if scenario.engine.sglang is not None:
        from harness.engine_traffic import check_sharding
        from harness.testbed.sglang import check_sglang

        refuse_remote(scenario)
        check_sharding(scenario)
        check_sglang(scenario)
    if scenario.engine.reference is not None:
        from harness.testbed.reference import check_reference

        check_reference(scenario)
    if scenario.gateway.tokenizer is not None:
        load_tokenizer(str(scenario.gateway.tokenizer))
    notes: tuple[str, ...] = ()
    if options.trace is not None and not options.keep_plan:
        scenario, notes = replan(scenario)
    return prepare(scenario, (*notes, *_traffic_notes(scenario)))


def _traffic_notes(scenario: "Scenario") -> "Iterator[str]":
    """What the engine's ranks and protocol add; labels of the run."""
    from harness.engine_traffic import traffic_notes
    from harness.throughput import deployment_model

    if scenario.engine.sglang is None:
        return iter(())
    models = {n: deployment_model(scenario, d) for n, d in scenario.deployments.items()}
    return traffic_notes(scenario, scenario.deployments, models)


def _bench(options: argparse.Namespace) -> int:
    from harness.bench import bench
    from harness.console import RunConsole

    if options.load_processes is not None:
        options.set.append(f"load.workers={options.load_processes}")
    if options.dry_run:
        return dry_run(options)
    if options.emit_attach is not None:
        raise ScenarioError("--emit-attach goes with --dry-run.")
    check_output_folder(options.runs, "--runs")
    if options.web is not None and not 0 <= options.web <= 65535:
        raise ScenarioError(f"--web {options.web}: a port is 0 to 65535; 0 is any that is free.")
    with RunConsole() as console:
        prepared = _prepared(options)
        for note in prepared.notes:
            console.say(note)
        result = bench(
            prepared,
            options.runs,
            options.repeats,
            console.say,
            console.progress,
            options.web,
        )
    print_verdict(result.run, as_json=options.json)
    if result.error is not None:
        print(f"prfaas: {result.error}", file=sys.stderr)
    return result.exit_status
