"""The scenario that a command line describes: a file, ``--set``, ``--trace`` and ``--duration``."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.core import ScenarioError

if TYPE_CHECKING:
    from harness.scenario import Scenario


#: Settings that --trace leaves their meaning, and those that are of a trace alone.
_OF_ANY_LOAD = (
    "load.seed",
    "load.workers",
    "load.concurrency",
    "load.think_time",
    "workload.rate_scale",
)
_OF_TRACE = (
    "workload.trace_format",
    "workload.trace_start",
    "workload.trace_time_scale",
    "workload.outside_bounds",
    "workload.min_tokens",
    "workload.max_tokens",
    "workload.output_min_tokens",
    "workload.output_max_tokens",
)


def add_scenario(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Options of every verb that takes a scenario."""
    parser.add_argument(
        "scenario",
        type=Path,
        nargs="?" if optional else None,
        metavar="SCENARIO",
        help="a scenario TOML file",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key, such as workload.cv=2 (repeatable)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="PATH",
        help="replay a trace instead of the scenario's workload (Mooncake JSONL, Azure or BurstGPT "
        "CSV, a folder of ServeGen's, a run of ours); "
        "threshold and splits are solved anew for its lengths",
    )
    parser.add_argument(
        "--duration", metavar="TIME", help='length of the run, such as "600s" (trace time)'
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def chosen_scenario(options: argparse.Namespace) -> "Scenario":
    """The scenario that the options describe; ScenarioError says what is wrong with them."""
    from harness.scenario import load_scenario
    from harness.scenario_change import with_trace
    from netem.units import parse_duration_s

    of_trace: list[str] = []
    if options.trace is not None:
        _refuse_overridden(options.set)
        of_trace = [setting for setting in options.set if _key(setting) in _OF_TRACE]
    own = [setting for setting in options.set if setting not in of_trace]
    scenario = load_scenario(options.scenario, own)
    duration_s: float | None = None
    if options.duration is not None:
        try:
            duration_s = parse_duration_s(options.duration)
        except ValueError as error:
            raise ScenarioError(f"--duration: {error}") from error
    if options.trace is not None:
        return with_trace(scenario, options.trace, duration_s, settings=of_trace)
    if duration_s is not None:
        return load_scenario(
            options.scenario, [*options.set, f'load.duration="{options.duration}"']
        )
    return scenario


def _key(setting: str) -> str:
    return setting.partition("=")[0].strip()


def _refuse_overridden(settings: Sequence[str]) -> None:
    """A trace brings its own lengths and arrivals: a setting for them would be without effect."""
    kept = (*_OF_TRACE, *_OF_ANY_LOAD)
    for setting in settings:
        key = _key(setting)
        if key.startswith(("load.", "workload.")) and key not in kept:
            raise ScenarioError(
                f"--set {key} has no effect with --trace, whose lengths and arrivals are its own; "
                "use --duration for its length and --set workload.rate_scale for its rate"
            )
