"""``prfaas sweep``: many simulations of a scenario, on local cores or on a Ray cluster."""

import argparse
import json
import shlex
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core import ScenarioError
from harness.verbs.output import check_output_folder

if TYPE_CHECKING:
    from harness.sweep.local import Pool
    from harness.sweep.results import SweepFolder
    from harness.sweep.run import Asked

_MOST_WORKERS = 1024


def add(verbs: Any) -> None:  # argparse publishes no name for what add_subparsers gives
    """The verb and its options."""
    parser = verbs.add_parser(
        "sweep",
        help="simulate a grid of scenarios, on local cores or on a Ray cluster",
        description="Simulates every cell of a sweep file (scenario keys varied by a grid, a list "
        "and seeds) and compares the points. Exit status 1 where cells have no result.",
    )
    parser.add_argument("sweep", type=Path, metavar="FILE", help="a sweep TOML file")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the scenario in all cells (repeatable)",
    )
    parser.add_argument(
        "--out",
        type=folder,
        metavar="DIR",
        help="the folder of the results, new or empty (default: one below runs)",
    )
    parser.add_argument(
        "--resume",
        type=folder,
        metavar="DIR",
        help="go on in the folder of a sweep that was begun",
    )
    parser.add_argument(
        "--workers", type=workers, metavar="N", help="local processes (default: one a core)"
    )
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help='run on the Ray cluster at host:port, ray://host:port or "auto" (extra ray)',
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.set_defaults(call=_sweep)


def folder(text: str) -> Path:
    """A folder's name, which as a path would be the working folder where it is empty."""
    if not text:
        raise argparse.ArgumentTypeError("needs the name of a folder")
    return Path(text)


def workers(text: str) -> int:
    """A number of workers; argparse puts this function's name into its message."""
    value = int(text)
    if not 1 <= value <= _MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"must be from 1 to {_MOST_WORKERS}")
    return value


def _sweep(options: argparse.Namespace) -> int:
    from harness.sweep.cells import resolve_cells
    from harness.sweep.console import SweepConsole, sweep_table
    from harness.sweep.file import read_sweep
    from harness.sweep.report import write_sweep_report
    from harness.sweep.run import Asked, run_sweep

    _check_options(options)
    sweep = read_sweep(options.sweep)
    cells = resolve_cells(sweep, options.set)
    pool, runs_on = _pool(options)
    folder = _folder(options, sweep.name)
    asked = Asked(sweep, tuple(options.set), cells, runs_on)
    with SweepConsole() as console:
        console.say(f"{len(cells)} cells on {runs_on}, into {folder.path}")
        try:
            document = run_sweep(asked, folder, pool, console.progress, console.say)
        except BaseException as error:
            if not isinstance(error, ScenarioError):
                console.say(_how_to_resume(options, folder, asked))
            raise
    write_sweep_report(document, folder.report_path)
    if options.json:
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        from rich.console import Console

        Console().print(sweep_table(document))
    _tell(document, folder)
    return 0 if document["num_completed"] == document["num_cells"] else 1


def _check_options(options: argparse.Namespace) -> None:
    if options.out is not None and options.resume is not None:
        raise ScenarioError("--out and --resume both name the folder; give one of them.")
    if options.ray is not None and options.workers is not None:
        raise ScenarioError(
            "--workers is of local processes, and with --ray the cluster's cores decide; give one "
            "of them."
        )
    if options.out is not None:
        check_output_folder(options.out, "--out")


def _pool(options: argparse.Namespace) -> "tuple[AbstractContextManager[Pool], str]":
    if options.ray is not None:
        from harness.sweep.on_ray import check_installed, ray_pool

        check_installed()
        return ray_pool(options.ray), f"the Ray cluster {options.ray}"
    from harness.sweep.local import local_pool

    given = options.workers
    return local_pool(given), "every local core" if given is None else f"{given} local workers"


def _folder(options: argparse.Namespace, name: str) -> "SweepFolder":
    from harness.sweep.results import SweepFolder, new_folder

    if options.resume is not None:
        return SweepFolder.existing(options.resume)
    return SweepFolder.create(options.out or new_folder(name))


def _how_to_resume(options: argparse.Namespace, folder: "SweepFolder", asked: "Asked") -> str:
    """After Ctrl-C, or after whatever else ended the sweep."""
    rows, _ = folder.read_rows()
    there = sum(cell.cell_id in rows for cell in asked.cells)
    words = ["prfaas", "sweep", str(options.sweep)]
    words += [word for flag in options.set for word in ("--set", flag)]
    words += ["--resume", str(folder.path)]
    words += [] if options.workers is None else ["--workers", str(options.workers)]
    words += [] if options.ray is None else ["--ray", options.ray]
    return f"{there} of {len(asked.cells)} cells are kept. To go on: {shlex.join(words)}"


def _tell(document: dict[str, Any], folder: "SweepFolder") -> None:
    for note in document["notes"]:
        print(note, file=sys.stderr)
    for one in document["failed"]:
        which = f"{one['num_cells']} cells {one['status']}, the first ({one['first']})"
        print(f"{which}: {one['reason']}", file=sys.stderr)
    print(f"results: {folder.path}", file=sys.stderr)
