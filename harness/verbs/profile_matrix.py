"""``prfaas profile matrix``: which model has costs on which hardware, and which it still lacks."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.profile_matrix import Cell, Matrix


def add_matrix(actions: Any) -> None:  # argparse publishes no name for what add_subparsers gives
    parser = actions.add_parser("matrix", help="models by hardware, and the cells still missing")
    parser.add_argument(
        "folder", type=Path, nargs="?", default=Path("profiles"), metavar="DIR",
        help="the folder of profiles (default: profiles)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.set_defaults(call=_matrix)


def _matrix(options: argparse.Namespace) -> int:
    from harness.profile_matrix import EXPECTED, profile_matrix

    matrix = profile_matrix(options.folder)
    for reason in matrix.skipped:
        print(f"prfaas: skipped: {reason}", file=sys.stderr)
    missing = {kind: list(matrix.missing(kind)) for kind in EXPECTED}
    if options.json:
        print(json.dumps({**asdict(matrix), "missing": missing}, indent=2))
        return 0
    _print(matrix)
    for kind, models in missing.items():
        print(f"missing on {kind}: {', '.join(models) or 'none'}")
    return 0


def _print(matrix: "Matrix") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(
        title="profiles: prefill/decode and the engine's version",
        caption="me measured, pu published, de derived, mo modelled, st stand-in: as the worst of "
        "its points; - none. SGLang where no engine is named",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("model", no_wrap=True)
    for kind in matrix.hardware:
        table.add_column(kind)
    cells = {(one.model, one.hardware): one for one in matrix.cells}
    for model in matrix.models:
        table.add_row(model, *(_text(cells[model, kind]) for kind in matrix.hardware))
    Console(highlight=False).print(table)


def _text(cell: "Cell") -> str:
    if cell.path is None:
        return "-"
    engine = (cell.engine or "").removeprefix("sglang ")
    return f"{cell.status[:2]}/{(cell.decode or '-')[:2]} {engine}"
