"""``prfaas bench --dry-run``: what a run on GPU nodes would be, without starting anything."""

import argparse
import json
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core import ScenarioError
from harness.verbs.output import check_output_file
from harness.verbs.scenario import chosen_scenario

if TYPE_CHECKING:
    from harness.scenario import Scenario


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print placements, launch commands, links and GPU-hours on the scenario's nodes, and "
        "start nothing",
    )
    parser.add_argument(
        "--emit-attach",
        type=Path,
        metavar="FILE",
        help="with --dry-run: write the scenario attached to those servers, to be run once they "
        "are ready; with several deployments one file each, FILE-DEPLOYMENT",
    )


def dry_run(options: argparse.Namespace) -> int:
    from harness.launch_plan.console import print_dry_run
    from harness.launch_plan.document import dry_run as described
    from harness.preparation import replan

    if options.emit_attach is not None:
        check_output_file(options.emit_attach, "--emit-attach")
        if options.trace is not None:
            raise ScenarioError(
                "--emit-attach writes the scenario's own workload; give the trace as --set "
                "workload.trace=PATH in place of --trace."
            )
    scenario = chosen_scenario(options)
    notes: tuple[str, ...] = ()
    if options.trace is not None and not options.keep_plan:
        scenario, notes = replan(scenario)
    document = described(scenario, options.repeats)
    document["notes"] = [*notes, *document["notes"]]
    if options.emit_attach is not None:
        _emit(options, scenario, document)
    if options.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        print_dry_run(document)
    return 0


def _emit(options: argparse.Namespace, scenario: "Scenario", document: dict[str, Any]) -> None:
    from harness.launch_plan.document import attach_text
    from harness.scenario_text import emit_attached

    path: Path = options.emit_attach
    settings = list(options.set)
    if options.duration is not None:
        settings.append(f'load.duration="{options.duration}"')
    for name in scenario.deployments:
        target = path
        if len(scenario.deployments) > 1:
            target = path.with_name(f"{path.stem}-{name}{path.suffix or '.toml'}")
        attach = tomllib.loads(attach_text(document, name))["engine"]["attach"]
        emit_attached(scenario, settings, attach, name, target)
        print(f"written: {target}", file=sys.stderr)


def refuse_remote(scenario: "Scenario") -> None:
    """ScenarioError where real servers would have to be launched on other hosts."""
    sglang = scenario.engine.sglang
    if sglang is None or not scenario.nodes:
        return
    names = dict.fromkeys(i.name for one in scenario.deployments.values() for i in one.instances())
    waiting = [name for name in names if name not in sglang.attach]
    if waiting:
        raise ScenarioError(
            f"The scenario file {scenario.path} names nodes, and {len(waiting)} of its instances "
            f"({', '.join(waiting[:3])}{', ...' if len(waiting) > 3 else ''}) are not attached: "
            "servers on other hosts are not launched by prfaas bench so far. Print the commands by "
            "prfaas bench --dry-run, start them on the nodes, and run the scenario that "
            "--emit-attach writes, whose [engine.attach] names the running servers. To rehearse on "
            'this machine, --set engine.kind="emulated" with a time and byte scale.'
        )
