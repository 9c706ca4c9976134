"""What a person sees of a sweep: one bar on a terminal while it runs, and the table at its end."""

from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from harness.sweep.grid import setting_text

_MOST_ROWS = 100


class SweepConsole:
    """Context manager: messages, and one bar, on stderr."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("cells"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[more]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("cells", total=None, more="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()

    def say(self, message: str) -> None:
        """One line."""
        self._console.print(message, markup=False, soft_wrap=True)

    def progress(self, there: int, total: int, without: int) -> None:
        """How many cells are there, ``without`` of them without a result."""
        more = f"{without} failed" if without else ""
        self._bar.update(self._task, completed=there, total=total, more=more)


def sweep_table(document: dict[str, Any]) -> Table:
    """A row a point: mean and interval over seeds, its cost, and whether it is on the front."""
    pareto, level = document["pareto"], document["level"]
    unit = {"GPUs": "number of GPUs"}.get(pareto["unit"], f"cost an hour, {pareto['unit']}")
    table = Table(
        title=f"{document['sweep']}: {document['num_completed']} of {document['num_cells']} cells",
        caption=f"n: seeds with a result; TTFT in s, means over seeds; +-: of P90, half the "
        f"{100 * level:.0f} % interval (Student's t); use: of the busiest stage; cost: {unit}; "
        "*: on the front, no point with the same demand beats it in cost, P90 and what it carries "
        "of the load; !: not compared, for it is overloaded or lacks one of these",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    keys = list(dict.fromkeys(key for point in document["points"] for key in point["settings"]))
    for name in short_names(keys):
        table.add_column(name, overflow="fold")
    table.add_column("deployment", no_wrap=True)
    for column in ("n", "mean", "P90", "+-", "req/s", "use", "cost", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for point in document["points"][:_MOST_ROWS]:
        cost = point[pareto["cost"]]
        table.add_row(
            *(setting_text(point["settings"].get(key, "-")) for key in keys),
            point["deployment"],
            f"{point['num_completed']}/{point['num_seeds']}",
            _figure(point["ttft_mean_s"]["mean"]),
            _figure(point["ttft_p90_s"]["mean"]),
            spread_text(point["ttft_p90_s"]),
            _figure(point["throughput_req_per_s"]["mean"]),
            _figure(point["utilisation"]["mean"]),
            "-" if cost is None else f"{cost:g}",
            {True: "*", False: "", None: "!"}[point["on_front"]],
        )
    if (more := len(document["points"]) - _MOST_ROWS) > 0:
        table.add_row(f"... and {more} more points in summary.json")
    return table


def short_names(keys: Sequence[str]) -> list[str]:
    """The last step of each key where no other one has the same, as words that a line may break."""
    last = Counter(key.rpartition(".")[2] for key in keys)
    short = [name if last[name := key.rpartition(".")[2]] == 1 else key for key in keys]
    return [name.replace(".", " ").replace("_", " ") for name in short]


def spread_text(figure: dict[str, Any]) -> str:
    """Half the interval's width; nothing where there is none."""
    if figure["low"] is None or figure["high"] is None:
        return ""
    return f"{(figure['high'] - figure['low']) / 2:.2f}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
