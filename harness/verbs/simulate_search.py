"""``prfaas simulate --lambda-max`` and ``--optimum``: searches by simulation, on all cores."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from harness.core import ScenarioError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.saturation.lambda_max import LoadTried
    from harness.scenario import Scenario

T = TypeVar("T")

#: Options of --lambda-max alone, by their attribute.
_OF_LAMBDA_MAX = {"slo_ttft": "--slo-ttft", "budget": "--budget", "tolerance": "--tolerance"}

#: Shows how far a deployment is: (share of the work, what is known).
Show = Callable[[float | None, str], None]


def add_search(parser: argparse.ArgumentParser) -> None:
    """The options of the searches."""
    group = parser.add_argument_group(
        "searches", "Many runs on all cores; with one of these --requests is of each run (10000)."
    )
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--lambda-max",
        action="store_true",
        help="search the highest load whose P90 of TTFT and TPOT meet the SLO",
    )
    which.add_argument(
        "--optimum",
        action="store_true",
        help="search the threshold and the split with the least P90 of TTFT at this load",
    )
    group.add_argument(
        "--slo-ttft", metavar="TIME", help='bound of P90 of TTFT, such as "5s" (default: slo.ttft)'
    )
    group.add_argument(
        "--budget",
        type=int,
        metavar="N",
        help="requests that --lambda-max may simulate for a deployment (default: 2000000)",
    )
    group.add_argument(
        "--tolerance",
        type=float,
        metavar="SHARE",
        help="how near to each other the ends of --lambda-max shall come (default: 0.02)",
    )
    group.add_argument(
        "--cores", type=int, metavar="N", help="processes of a search (default: all cores)"
    )


def is_search(options: argparse.Namespace) -> bool:
    """Whether a search is wanted; ScenarioError for options that do not go together."""
    for name, flag in _OF_LAMBDA_MAX.items():
        if getattr(options, name) is not None and not options.lambda_max:
            raise ScenarioError(f"{flag} is of --lambda-max; give that too, or leave it out.")
    wanted = bool(options.lambda_max or options.optimum)
    if options.cores is not None and not wanted:
        raise ScenarioError("--cores is of --lambda-max and --optimum; a simulation takes one.")
    if options.cores is not None and options.cores < 1:
        raise ScenarioError(f"--cores must be 1 or more, not {options.cores}.")
    if not wanted:
        return False
    if options.runs is not None:
        raise ScenarioError("--runs keeps one run, and a search makes many; leave it out.")
    if options.lambda_max and options.load is not None:
        raise ScenarioError("--load has no effect with --lambda-max, which searches the load.")
    return True


def search(options: argparse.Namespace, scenario: "Scenario") -> int:
    """Run the search and print what it found."""
    begun_s = time.monotonic()
    run = _lambda_max if options.lambda_max else _optimum
    document = run(options, scenario)
    document["wall_s"] = time.monotonic() - begun_s
    for note in document["notes"]:
        print(note, file=sys.stderr)
    if options.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        from rich.console import Console

        table = _lambda_max_table if options.lambda_max else _optimum_table
        Console().print(table(document))
    return 0


def _lambda_max(options: argparse.Namespace, scenario: "Scenario") -> dict[str, Any]:
    from harness.cores import Cores
    from harness.saturation.document import lambda_max_document
    from harness.saturation.lambda_max import Effort, lambda_max

    ttft_s, effort = _ttft_s(options, scenario), _effort(options, Effort())

    def one(name: str, cores: Cores, show: Show) -> Any:
        def watch(used: int, tried: "LoadTried") -> None:
            at = f"{tried.rate_req_per_s:.3f} req/s {tried.judgement.outcome}"
            show(used / effort.budget_requests, at)

        transfer = not options.no_transfer
        return lambda_max(scenario, name, ttft_s, effort, cores, transfer=transfer, watch=watch)

    return lambda_max_document(scenario, ttft_s, effort, _each(options, scenario, one))


def _optimum(options: argparse.Namespace, scenario: "Scenario") -> dict[str, Any]:
    from harness.cores import Cores
    from harness.saturation.document import optimum_document
    from harness.saturation.optimum import optimum
    from harness.saturation.trial import LEAST_REQUESTS
    from harness.throughput import DEFAULT_OBJECTIVE

    num_requests: int = options.requests or LEAST_REQUESTS

    def one(name: str, cores: Cores, show: Show) -> Any:
        def watch(tried: int) -> None:
            show(None, f"{tried} plans")

        transfer = not options.no_transfer
        return optimum(
            scenario, name, cores, num_requests=num_requests, transfer=transfer, watch=watch
        )

    found = _each(options, scenario, one)
    return optimum_document(scenario, DEFAULT_OBJECTIVE, num_requests, found)


def _ttft_s(options: argparse.Namespace, scenario: "Scenario") -> float:
    from netem.units import parse_duration_s

    if options.slo_ttft is None:
        if scenario.slo.ttft_s is None:
            raise ScenarioError(
                f"There is no 'slo.ttft' in the scenario file {scenario.path}, and --lambda-max "
                "needs a bound of TTFT. Give --slo-ttft, for example --slo-ttft 10s."
            )
        return scenario.slo.ttft_s
    try:
        ttft_s = parse_duration_s(options.slo_ttft)
    except ValueError as error:
        raise ScenarioError(f"--slo-ttft: {error}") from error
    if ttft_s <= 0:
        raise ScenarioError(f"--slo-ttft must be more than nothing, not {options.slo_ttft}.")
    return ttft_s


def _effort(options: argparse.Namespace, default: Any) -> Any:
    from dataclasses import replace

    if options.requests is not None:
        default = replace(default, least_requests=options.requests)
    given = {"budget_requests": options.budget, "tolerance": options.tolerance}
    for (name, value), flag in zip(given.items(), ("--budget", "--tolerance"), strict=True):
        if value is not None and not value > 0:
            raise ScenarioError(f"{flag} must be more than 0, not {value}.")
        if value is not None:
            default = replace(default, **{name: value})
    return default


def _each(
    options: argparse.Namespace, scenario: "Scenario", one: Callable[[str, Any, Show], T]
) -> dict[str, T]:
    """The search of every deployment, one after another, each on all cores."""
    from harness.cores import Cores

    found: dict[str, T] = {}
    with Cores(options.cores) as cores:
        for name in scenario.deployments:
            with _shown(name) as show:
                found[name] = one(name, cores, show)
    return found


@contextmanager
def _shown(name: str) -> "Iterator[Show]":
    """A bar on a terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    bar = Progress(
        TextColumn("{task.description:<26}"),
        BarColumn(),
        TextColumn("{task.fields[known]}"),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task(name, total=None, known="")

        def show(share: float | None, known: str) -> None:
            total = None if share is None else 1.0
            bar.update(task, total=total, completed=share or 0.0, known=known)

        yield show
        bar.update(task, total=1.0, completed=1.0)


def _lambda_max_table(document: dict[str, Any]) -> Any:
    from rich import box
    from rich.table import Table

    slo = document["slo"]
    table = Table(
        title=f"Lambda_max by simulation: {document['scenario']}, P90 of TTFT within "
        f"{slo['ttft_s']:g} s and TPOT within {1e3 * slo['tpot_s']:g} ms",
        caption="req/s. low meets the SLO, high misses it, est. is where P90 crosses it; x: times "
        "homogeneous_pd; sat: throughput of an overloaded run; Eq. 6 with E\\[T(l)] and T(E\\[l]); "
        f"the bracket holds with {100 * document['confidence']:g} %",
        box=box.SIMPLE_HEAD,
        padding=0,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("deployment", no_wrap=True)
    for column in ("low", "high", "est.", "ended", "x", "sat", "E[T]", "T(E)"):
        table.add_column(column.replace("[", "\\["), justify="right", no_wrap=True)
    for name, one in document["deployments"].items():
        times = one["times_homogeneous_pd"]
        table.add_row(
            name,
            *map(_figure, one["lambda_max_at_slo_req_per_s"]),
            _figure(one["lambda_max_at_slo_estimate_req_per_s"]),
            one["ended"],
            "-" if times is None else f"{times[0]:.2f}-{times[1]:.2f}",
            _figure(one["saturated_throughput_req_per_s"]),
            _figure(one["lambda_max_exact_req_per_s"]),
            _figure(one["lambda_max_req_per_s"]),
        )
    return table


def _optimum_table(document: dict[str, Any]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"threshold and split by simulation: {document['scenario']}, "
        f"{document['rate_req_per_s']:g} req/s",
        caption="t in tokens and N_p/N_d, of the formula and of the search; P90 of TTFT in s on "
        "fresh seeds; ratio: best over formula with its 95 % interval, paired by seed",
        box=box.SIMPLE_HEAD,
        padding=0,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("deployment", no_wrap=True)
    for column in ("formula", "P90", "best", "P90", "ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, one in document["deployments"].items():
        inside = one["best_over_formula_interval"]
        ratio = "-"
        if inside["low"] is not None:
            ratio = f"{one['best_over_formula']:.3f} ({inside['low']:.3f}-{inside['high']:.3f})"
        elif one["answer"] == "same_plan":
            ratio = "same plan"
        table.add_row(
            name,
            _plan(one["formula"]),
            _figure(one["formula"]["ttft_p90_s"]),
            _plan(one["best"]),
            _figure(one["best"]["ttft_p90_s"]),
            ratio,
        )
    return table


def _plan(plan: dict[str, Any]) -> str:
    t = plan["threshold_tokens"]
    split = f"{plan['num_prefill']}/{plan['num_decode']}"
    return split if t is None else f"{t:,} {split}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
