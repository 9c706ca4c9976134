"""What a person sees while a run goes on, and the table at its end. All of it on stderr.

Progress bars only where stderr is a terminal; elsewhere a line when something begins or ends.
stdout is left to the table for people, or to the one JSON document of ``--json``.
"""

from types import TracebackType
from typing import Any, Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from harness.phrases import SHORT_STAGES


class RunConsole:
    """Context manager: messages, and one bar a deployment on a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description:<26}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[more]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bars.stop()

    def say(self, message: str) -> None:
        """One line."""
        self._console.print(message, markup=False, soft_wrap=True)

    def progress(self, name: str, total: int, sent: int, completed: int, failed: int) -> None:
        """Where a deployment's load stands."""
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, more="")
        more = f"sent {sent}" + (f", failed {failed}" if failed else "")
        self._bars.update(self._tasks[name], completed=completed + failed, more=more)


def verdict_table(document: dict[str, Any]) -> Table:
    """The deployments side by side at the offered load, and their modelled capacity."""
    is_simulated = document["verdict"] == "simulated"
    title = f"{document['verdict']} (link: {document['link_backend'] or 'not built'}, "
    title += f"time scale {document['time_scale']:g}, byte scale {document['byte_scale']:g})"
    table = Table(
        title="simulated: nothing was run, and there is no verdict" if is_simulated else title,
        caption=f"TTFT in s, {'simulated' if is_simulated else 'measured; sim = simulated mean'}; "
        "good = goodput, req/s within the SLO; max = modelled capacity, Lambda_max with T(E\\[l]) "
        "in req/s. P99 needs 1,000 effective samples.",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("deployment", no_wrap=True)
    for column in ("completed", "mean", "P50", "P90", "P99", "sim", "good", "max"):
        table.add_column(column, justify="right")
    for name, one in document["deployments"].items():
        table.add_row(
            name,
            f"{one['num_completed']}/{one['num_planned']}",
            _figure(one["ttft_mean_s"]),
            _figure(one["ttft_p50_s"]),
            _figure(one["ttft_p90_s"]),
            _figure(one["ttft_p99_s"]),
            _figure(one["modelled_ttft_mean_s"]),
            _figure(one.get("goodput_req_per_s")),
            _figure(one.get("lambda_max_req_per_s")),
        )
    return table


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def simulation_table(document: dict[str, Any]) -> Table:
    """The deployments side by side, as simulated. Fits 80 columns."""
    table = Table(
        title=f"simulated: {document['scenario']}, {document['num_requests']} requests",
        caption="plan: N_prfaas/N_p/N_d; t: threshold in tokens; fail: requests that failed; TTFT "
        "in s, inf: too few completed to reach it, and with failures there is no mean; use: of the "
        "busiest stage; max: modelled capacity, Lambda_max with T(E\\[l]) in req/s",
        box=box.SIMPLE_HEAD,
        padding=0,
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("deployment", no_wrap=True)
    for column in ("plan", "t", "fail", "mean", "P50", "P90", "busiest", "use", "max"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, one in document["deployments"].items():
        counts = (one["num_prfaas"], one["num_prefill"], one["num_decode"])
        threshold = one["threshold_tokens"]
        stage = max(one["utilisation"], key=one["utilisation"].__getitem__)
        table.add_row(
            name,
            "/".join(str(count or "-") for count in counts),
            "-" if threshold is None else f"{threshold:,}",
            f"{one['num_failed']:,}",
            _figure(one["ttft_mean_s"]),
            *(_quantile(one, f"ttft_{name}_s") for name in ("p50", "p90")),
            SHORT_STAGES[stage],
            _figure(one["utilisation"][stage]),
            _figure(one["lambda_max_req_per_s"]),
        )
    return table


def _quantile(one: dict[str, Any], key: str) -> str:
    """A quantile; of requests that fail it is infinite, which JSON has as null."""
    return "inf" if one[key] is None and one["num_failed"] else _figure(one[key])
