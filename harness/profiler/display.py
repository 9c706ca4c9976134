"""What a person sees of a profile being measured: a bar, then a table, and a page with plots."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pandas as pd
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from harness.profile_file import ProfileFile
from harness.profile_measurement import BatchFile
from harness.profiler.plan import Cell
from reports import document as report
from reports.render import render

#: Between two lines where there is no terminal.
LINE_EVERY_S = 30.0


class ProfileConsole:
    """Context manager: a bar on a terminal, a line now and then elsewhere; all on stderr."""

    def __init__(self, budget_s: float) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description:<34}"),
            BarColumn(),
            TextColumn("{task.fields[visits]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, visits="")
        self._budget_s = budget_s
        self._said_s = time.monotonic()

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

    def progress(self, cell: Cell | None, done: int, left: int) -> None:
        """Where the session stands; what is left grows when a point turns out to be noisy."""
        label = "done" if cell is None else cell.label
        self._bar.update(
            self._task,
            description=label,
            total=done + left,
            completed=done,
            visits=f"{done}/{done + left} visits, budget {self._budget_s / 60:.0f} min",
        )
        now_s = time.monotonic()
        if self._bar.disable and now_s - self._said_s > LINE_EVERY_S:
            self._said_s = now_s
            self.say(f"{done} of {done + left} visits; last: {label}")

    def show(self, file: ProfileFile) -> None:
        """The table at the end."""
        for table in tables(file):
            self._console.print(table)
        assert file.measurement is not None
        for row in file.measurement.missing:
            self.say(f"not tight: {row.point}: {row.reason}")
        for note in file.measurement.notes:
            self.say(f"note: {note}")


def tables(file: ProfileFile) -> Iterator[Table]:
    """Points, what outside and inside differ by, and what traffic costs."""
    yield _points(file)
    measurement = file.measurement
    assert measurement is not None
    if measurement.overhead:
        yield _overhead(file)
    if measurement.slo_tpot_s is not None and measurement.slo_batches:
        within = f"largest batch within {1e3 * measurement.slo_tpot_s:g} ms a token"
        yield _batches(within, measurement.slo_batches)
    if measurement.memory_batches:
        yield _batches("largest batch that KV memory holds", measurement.memory_batches)
    if measurement.interference:
        table = _table("beside KV traffic", "point", "ratio", "95 %", "KV Gbit/s")
        for one in measurement.interference:
            what = f"{one.batch} x {one.context_tokens:,}" if one.batch else f"{one.new_tokens:,}"
            interval = (
                "-" if one.interval is None else f"{one.interval[0]:.3f}..{one.interval[1]:.3f}"
            )
            rate = f"{8e-9 * one.kv_bytes_per_s:.3g}"
            table.add_row(
                f"{one.kind.replace('_', ' ')} {what}", f"{one.ratio:.3f}", interval, rate
            )
        yield table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=0, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=True)
    return table


def _batches(title: str, rows: list[BatchFile]) -> Table:
    table = _table(title, "context", "batch")
    for row in rows:
        table.add_row(
            f"{row.context_tokens:,}", "-" if row.max_batch is None else str(row.max_batch)
        )
    return table


def _points(file: ProfileFile) -> Table:
    table = _table(
        f"{file.model} on {file.hardware}, {file.engine.name} {file.engine.version}",
        "point", "ms", "+- 95 %", "visits", "Phi_kv Gbit/s",
    )  # fmt: skip
    assert file.measurement is not None
    phi = {row.tokens: row.phi_bytes_per_s for row in file.measurement.kv}
    for p in file.prefill.points:
        cached = f" after {p.cached_tokens:,}" if p.cached_tokens else ""
        rate = "-" if p.cached_tokens else f"{8e-9 * phi[p.new_tokens]:.3g}"
        known = _known(p.prefill_s, p.interval_s, p.samples)
        table.add_row(f"prefill {p.new_tokens:,}{cached}", f"{1e3 * p.prefill_s:.4g}", *known, rate)
    for d in file.decode.points if file.decode else ():
        known = _known(d.step_s, d.interval_s, d.samples)
        name = f"decode {d.batch} x {d.context_tokens:,}"
        table.add_row(name, f"{1e3 * d.step_s:.4g}", *known, "")
    return table


def _known(mean: float, interval: list[float] | None, samples: int | None) -> tuple[str, str]:
    half = "-" if interval is None else f"{(interval[1] - interval[0]) / 2 / mean:.2%}"
    return half, str(samples or "-")


def _overhead(file: ProfileFile) -> Table:
    assert file.measurement is not None
    rows = file.measurement.overhead
    names = sorted({name for row in rows for name in row.parts_s})
    table = _table(
        "T_prefill from inside and outside (TTFT of one token), ms: means, their difference and "
        "what it is the sum of; 'median' is the median difference",
        "new tokens", "inside", "outside", "median", "diff", *names,
    )  # fmt: skip
    for row in rows:
        cached = f" after {row.cached_tokens:,}" if row.cached_tokens else ""
        parts = (row.parts_s.get(name, 0.0) for name in names)
        diff_s = row.outside_s - row.inside_s
        times = (row.inside_s, row.outside_s, row.median_difference_s, diff_s, *parts)
        table.add_row(f"{row.new_tokens:,}{cached}", *(f"{1e3 * one:.4g}" for one in times))
    return table


def write_page(file: ProfileFile, path: Path) -> Path:
    """The profile as one HTML page: curves, grid, intervals and what else was found."""
    assert file.measurement is not None
    blocks: list[report.Block] = [report.Figure(_prefill_chart(file))]
    if file.decode is not None:
        blocks.append(report.Figure(_decode_chart(file)))
    blocks += _page_tables(file)
    if file.measurement.missing:
        lines = tuple(f"{row.point}: {row.reason}" for row in file.measurement.missing)
        blocks.append(report.Notice("bad", "Not tight or not there", lines))
    if file.measurement.notes:
        blocks.append(report.Items(tuple(file.measurement.notes)))
    subtitle = (
        f"{file.hardware}, {file.engine.name} {file.engine.version}, measured from "
        f"{file.measurement.started_utc}"
    )
    section = report.Section("Measured costs", tuple(blocks))
    return render(report.Document(f"Profile of {file.model}", subtitle, (section,)), path)


def _prefill_chart(file: ProfileFile) -> report.Chart:
    rows = [
        {"tokens": p.new_tokens, "seconds": p.prefill_s, "cached": f"{p.cached_tokens:,} cached"}
        for p in file.prefill.points
    ]
    return _lines(rows, "T_prefill by prompt length", "tokens", "new tokens", "cached")


def _decode_chart(file: ProfileFile) -> report.Chart:
    assert file.decode is not None
    rows = [
        {"batch": p.batch, "seconds": p.step_s, "context": f"{p.context_tokens:,} tokens"}
        for p in file.decode.points
    ]
    return _lines(rows, "T_decode by batch", "batch", "requests that decode together", "context")


def _lines(rows: list[dict[str, Any]], title: str, x: str, what: str, series: str) -> report.Chart:
    return report.Chart(
        kind="lines",
        frame=pd.DataFrame(rows),
        title=title,
        alt=title,
        x=report.Axis(x, what, log=True),
        y=report.Axis("seconds", "seconds", log=True),
        series=series,
        order=tuple(dict.fromkeys(row[series] for row in rows)),
        series_title=series,
    )


def _page_tables(file: ProfileFile) -> Iterator[report.Table]:
    points = [p.model_dump() for p in file.prefill.points]
    yield report.Table(_frame(points), "Prefill; seconds, intervals of 95 %")
    if file.decode is not None:
        yield report.Table(
            _frame([p.model_dump() for p in file.decode.points]), "Decode steps; seconds"
        )
    assert file.measurement is not None
    found = (
        ("Outside and inside; seconds", file.measurement.overhead),
        ("KV; bytes and bytes a second", file.measurement.kv),
        ("Largest batch within the SLO", file.measurement.slo_batches),
        ("Largest batch that KV memory holds", file.measurement.memory_batches),
        ("Beside KV traffic", file.measurement.interference),
    )
    for caption, rows in found:
        if rows:
            yield report.Table(_frame([row.model_dump() for row in rows]), caption)


def _frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Without what every row has in common; lists and mappings as text."""
    dropped = ("provenance", "source")
    return pd.DataFrame(
        [
            {
                key: _text(value) if isinstance(value, list | dict) else value
                for key, value in row.items()
                if key not in dropped
            }
            for row in rows
        ]
    )


def _text(value: list[float] | dict[str, float]) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {one:.4g}" for key, one in value.items())
    return " to ".join(f"{one:.6g}" for one in value)
