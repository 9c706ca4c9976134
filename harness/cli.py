"""``prfaas``: one sub-command is one call. Also ``python -m harness``.

Exit status: 0 a supported verdict, 1 the run finished but a gate failed or a claim is not
supported, 2 bad usage or scenario, 3 the testbed could not be built or died.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness import __version__
from harness.core import PrfaasError, ScenarioError

if TYPE_CHECKING:
    from harness.record.run_directory import RunDirectory


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; errors that are the user's or the testbed's are one paragraph."""
    options = _parser().parse_args(arguments)
    # A supervisor's SIGTERM and a closed terminal end a run as Ctrl-C does: records kept,
    # everything taken down.
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.default_int_handler)
    try:
        status: int = options.call(options)
        sys.stdout.flush()
    except PrfaasError as error:
        print(f"prfaas: {error}", file=sys.stderr)
        return error.exit_status
    except OSError as error:
        where = "standard output" if error.filename is None else error.filename
        print(f"prfaas: cannot read or write {where}: {error.strerror}", file=sys.stderr)
        if error.filename is None:
            # What is left in the buffer cannot be written at the interpreter's end either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PrfaasError.exit_status
    except KeyboardInterrupt:
        print("prfaas: interrupted", file=sys.stderr)
        return 1
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="prfaas",
        description="Measures whether LLM prefill can leave the datacenter.",
        epilog="Exit status: 0 supported, 1 not supported, 2 bad usage or scenario, "
        "3 the testbed could not be built or died.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    _add_bench(verbs)
    _add_simulate(verbs)
    report = verbs.add_parser("report", help="rebuild tables, verdict and report of a run")
    report.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    report.add_argument(
        "--json", action="store_true", help="print the verdict as one JSON document"
    )
    report.set_defaults(call=_report)
    schema = verbs.add_parser("schema", help="print the JSON Schema of a scenario, for editors")
    schema.set_defaults(call=_schema)
    return parser


def _add_scenario(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("scenario", type=Path, metavar="SCENARIO", help="a scenario TOML file")
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
        help="replay a Mooncake JSONL or Azure CSV trace instead of the scenario's workload; "
        "threshold and splits are solved anew for its lengths",
    )
    parser.add_argument(
        "--duration", metavar="TIME", help='length of the run, such as "600s" (trace time)'
    )
    parser.add_argument(
        "--keep-plan",
        action="store_true",
        help="keep the scenario's threshold and splits with --trace",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")


def _add_bench(verbs: Any) -> None:  # argparse publishes no name for what add_subparsers gives
    parser = verbs.add_parser("bench", help="run the deployments of a scenario live")
    _add_scenario(parser)
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="where run directories go"
    )
    parser.add_argument(
        "--repeats",
        type=count,
        default=1,
        metavar="N",
        help="run each deployment N times in interleaved order (default 1)",
    )
    parser.set_defaults(call=_bench)


def _add_simulate(verbs: Any) -> None:  # as above
    parser = verbs.add_parser("simulate", help="simulate the deployments of a scenario")
    _add_scenario(parser)
    parser.set_defaults(call=_simulate)


def count(text: str) -> int:
    """A number of repeats; argparse puts this function's name into its message."""
    value = int(text)
    if not 1 <= value <= 100:
        raise argparse.ArgumentTypeError("must be from 1 to 100")
    return value


def _prepared(options: argparse.Namespace) -> Any:
    """The scenario that the options describe, scheduled, modelled and simulated."""
    from harness.preparation import prepare, replan
    from harness.scenario import load_scenario
    from harness.scenario_change import with_trace
    from netem.units import parse_duration_s

    scenario = load_scenario(options.scenario, options.set)
    duration_s: float | None = None
    if options.duration is not None:
        try:
            duration_s = parse_duration_s(options.duration)
        except ValueError as error:
            raise ScenarioError(f"--duration: {error}") from error
    notes: tuple[str, ...] = ()
    if options.trace is not None:
        _refuse_overridden(options.set)
        scenario = with_trace(scenario, options.trace, duration_s)
    elif duration_s is not None:
        scenario = load_scenario(
            options.scenario, [*options.set, f'load.duration="{options.duration}"']
        )
    if options.trace is not None and not options.keep_plan:
        scenario, notes = replan(scenario)
    return prepare(scenario, notes)


def _refuse_overridden(settings: Sequence[str]) -> None:
    """A trace brings its own lengths and arrivals: a setting for them would be without effect."""
    kept = ("load.seed", "workload.rate_scale")
    for setting in settings:
        key = setting.partition("=")[0].strip()
        if key.startswith(("load.", "workload.")) and key not in kept:
            raise ScenarioError(
                f"--set {key} has no effect with --trace, whose lengths and arrivals are its own; "
                "use --duration for its length and --set workload.rate_scale for its rate"
            )


def _bench(options: argparse.Namespace) -> int:
    from harness.bench import bench
    from harness.console import RunConsole

    with RunConsole() as console:
        prepared = _prepared(options)
        for note in prepared.notes:
            console.say(note)
        result = bench(prepared, options.runs, options.repeats, console.say, console.progress)
    _print_verdict(result.run, as_json=options.json)
    if result.error is not None:
        print(f"prfaas: {result.error}", file=sys.stderr)
    return result.exit_status


def _simulate(options: argparse.Namespace) -> int:
    from harness.console import simulation_table
    from harness.simulation_summary import simulation_document

    document = simulation_document(_prepared(options))
    for note in document["notes"]:
        print(note, file=sys.stderr)
    if options.json:
        print(json.dumps(document, indent=2))
    else:
        from rich.console import Console

        Console().print(simulation_table(document))
    return 0


def _report(options: argparse.Namespace) -> int:
    from harness.record.run_directory import RunDirectory
    from harness.record.tables import compact
    from harness.report import write_report
    from harness.verdict import judge

    run = RunDirectory(options.run)
    compact(run)
    verdict = judge(run)
    write_report(run)
    _print_verdict(run, as_json=options.json)
    return verdict.exit_status


def _print_verdict(run: "RunDirectory", *, as_json: bool) -> None:
    from rich.console import Console

    from harness.console import verdict_table

    text = run.verdict_path.read_text()
    if as_json:
        print(text, end="")
        return
    document = json.loads(text)
    Console().print(verdict_table(document))
    for reason in document["reasons"]:
        print(f"not supported: {reason}")
    print(f"report: {run.report_path}")


def _schema(_options: argparse.Namespace) -> int:
    from harness.scenario_file import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0
