"""What became of each request, as columns: a million of them are one array, not a million objects.

While a run goes on each request that ends adds one tuple of instants; every ``CHUNK`` of them
become a block of rows. Durations are taken from the instants when somebody asks.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

from harness.core import Outcome, Request, Route
from harness.simulator.records import Live, SimulatedRequest

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Rows of a block.
CHUNK = 16_384
#: What a row holds: whole numbers, then instants in scenario seconds, NaN where not reached.
FIELDS = (
    "number",
    "phase",
    "route",
    "kv_bytes",
    "cached_tokens",
    "fetched_tokens",
    "resident_tokens",
    "planned_s",
    "hop_s",
    "start_s",
    "service_s",
    "end_s",
    "landed_s",
    "granted_s",
    "first_s",
    "second_s",
    "left_s",
    "placed_s",
    "retries",
)
Row = tuple[float, ...]
#: Where a request failed, by its code; 0 is of those that completed.
PHASES: tuple[str | None, ...] = (
    None,
    "decode_admission",
    "rejected",
    "prefill_queue",
    "transfer",
    "prefill",
    "decode",
    "instance_down",
)
PHASE_CODES = {name: code for code, name in enumerate(PHASES) if name is not None}
NO_ROUTE = -1
_AT = {name: place for place, name in enumerate(FIELDS)}
_DURATIONS: dict[str, Callable[["SimulatedRows"], FloatArray]] = {
    "prefill_queue_s": lambda of: (
        of.column("start_s") - (of.column("placed_s") + of.column("hop_s"))
    ),
    "prefill_s": lambda of: of.column("service_s"),
    "transfer_s": lambda of: of.column("landed_s") - of.column("end_s") + of.column("hop_s"),
    "decode_admission_s": lambda of: of.column("granted_s") - of.column("landed_s"),
    "first_token_s": lambda of: np.where(np.isnan(of.column("first_s")), math.nan, 0.0),
    "ttft_s": lambda of: of.column("first_s") - of.column("planned_s"),
    "time_to_second_token_s": lambda of: of.column("second_s") - of.column("planned_s"),
    "e2e_s": lambda of: of.column("finish_s") - of.column("planned_s"),
    "gateway_s": lambda of: of.column("placed_s") - of.column("planned_s"),
}


class SimulatedRows(Sequence[SimulatedRequest]):
    """Rows of requests of one schedule; each is a ``SimulatedRequest`` on access.

    ``matrix`` holds one column a field  # [requests, fields]
    """

    def __init__(
        self, schedule: Sequence[Request], routes: Sequence[Route], matrix: FloatArray
    ) -> None:
        self.schedule = schedule
        self.routes = routes
        self._matrix = matrix

    def __len__(self) -> int:
        return len(self._matrix)

    @overload
    def __getitem__(self, which: int) -> SimulatedRequest: ...
    @overload
    def __getitem__(self, which: slice) -> "SimulatedRows": ...
    def __getitem__(self, which: int | slice) -> "SimulatedRequest | SimulatedRows":
        if isinstance(which, slice):
            return SimulatedRows(self.schedule, self.routes, self._matrix[which])
        row = range(len(self))[which]
        return next(iter(self[row : row + 1]))

    def __iter__(self) -> Iterator[SimulatedRequest]:
        for start in range(0, len(self), CHUNK):
            part = self[start : start + CHUNK]
            names = ("number", "route", "phase", "planned_s", *_WHOLE, *_DURATIONS)
            columns = [part.column(name).tolist() for name in names]
            yield from (self._request(*row) for row in zip(*columns, strict=True))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SimulatedRows):
            return NotImplemented
        return (
            np.array_equal(self._matrix, other._matrix, equal_nan=True)
            and list(self.routes) == list(other.routes)
            and len(self.schedule) == len(other.schedule)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays have none

    def column(self, name: str) -> FloatArray:
        """A field, or a duration under the name that it has in ``SimulatedRequest``; NaN where a
        request has none. # [requests]"""
        if name in _AT:
            return self._matrix[:, _AT[name]]
        if name == "finish_s":
            return _finish_s(self)
        return _DURATIONS[name](self)

    def whole(self, name: str) -> IntArray:
        """A field of whole numbers that every row has. # [requests]"""
        return self.column(name).astype(np.int64)

    @property
    def failed(self) -> npt.NDArray[np.bool_]:
        """# [requests]"""
        return np.asarray(self.column("phase") > 0)

    def in_order(self) -> "SimulatedRows":
        """The rows by their place in the schedule."""
        order = np.argsort(self.column("number"), kind="stable")
        return SimulatedRows(self.schedule, self.routes, self._matrix[order])

    def _request(
        self,
        number: float,
        route: float,
        phase: float,
        planned_s: float,
        kv_bytes: float,
        cached_tokens: float,
        fetched_tokens: float,
        resident_tokens: float,
        retries: float,
        *durations_s: float,
    ) -> SimulatedRequest:
        request = self.schedule[int(number)]
        outcome: Outcome = "failed" if phase else "completed"
        queue_s, prefill_s, transfer_s, admission_s, first_s, ttft_s, second_s, e2e_s, gateway_s = (
            None if math.isnan(one) else one for one in durations_s
        )
        return SimulatedRequest(
            rid=request.rid,
            index=request.index,
            planned_s=planned_s,
            input_tokens=request.input_tokens,
            output_tokens=request.output_tokens,
            route=None if route == NO_ROUTE else self.routes[int(route)],
            outcome=outcome,
            failure_phase=PHASES[int(phase)],
            prefill_queue_s=queue_s,
            prefill_s=prefill_s,
            transfer_s=transfer_s,
            decode_admission_s=admission_s,
            first_token_s=first_s,
            ttft_s=ttft_s,
            time_to_second_token_s=second_s,
            e2e_s=e2e_s,
            kv_bytes=None if math.isnan(kv_bytes) else int(kv_bytes),
            cached_tokens=int(cached_tokens),
            fetched_tokens=int(fetched_tokens),
            resident_tokens=int(resident_tokens),
            retries=int(retries),
            gateway_s=gateway_s,
        )


def _finish_s(rows: SimulatedRows) -> FloatArray:
    """When decoding was over, of those that completed. # [requests]"""
    return np.where(rows.column("phase") > 0, math.nan, rows.column("left_s"))


_WHOLE = ("kv_bytes", "cached_tokens", "fetched_tokens", "resident_tokens", "retries")

#: Takes the rows of a block as they are made, in the order in which requests ended.
Sink = Callable[[SimulatedRows], None]


class RowWriter:
    """Collects tuples in the order of ``FIELDS`` and gives them on in blocks."""

    def __init__(self, schedule: Sequence[Request], sink: Sink | None) -> None:
        self._schedule = schedule
        self._sink = sink
        self._kept: list[FloatArray] = []
        self.routes: list[Route] = []
        self._codes: dict[tuple[str, str], int] = {}
        self._rows: list[Row] = []
        self.num_rows = 0
        self.num_completed = 0
        #: How many failed in each phase.
        self.failures: Counter[str] = Counter()
        self._ttft_s: list[FloatArray] = []

    def route_code(self, route: Route) -> int:
        """The number of a route in the rows."""
        ends = (route.prefill.name, route.decode.name)
        code = self._codes.get(ends)
        if code is None:
            code = self._codes[ends] = len(self.routes)
            self.routes.append(route)
        return code

    def add(self, row: Row) -> None:
        """One request has ended."""
        self._rows.append(row)
        if len(self._rows) == CHUNK:
            self.flush()

    def flush(self) -> None:
        """Give on what has been collected."""
        if not self._rows:
            return
        matrix = np.array(self._rows, dtype=np.float64)
        self._rows.clear()
        self.num_rows += len(matrix)
        block = SimulatedRows(self._schedule, self.routes, matrix)
        phases = block.whole("phase")
        done = phases == 0
        self.num_completed += int(done.sum())
        self.failures.update(str(PHASES[code]) for code in phases[~done].tolist())
        ttft_s = np.stack([block.column("number"), block.column("ttft_s")])[:, done]
        self._ttft_s.append(ttft_s)
        if self._sink is None:
            self._kept.append(matrix)
        else:
            self._sink(block)

    def ttft_s(self) -> FloatArray:
        """Of the requests that completed, in the order of the schedule. # [completed]"""
        number, ttft_s = np.concatenate([np.empty((2, 0)), *self._ttft_s], axis=1)
        return np.asarray(ttft_s[np.argsort(number, kind="stable")])

    def finish(self) -> SimulatedRows:
        """All rows in the order of the schedule; none where they were given on."""
        self.flush()
        empty = np.empty((0, len(FIELDS)))
        matrix = np.concatenate(self._kept) if self._kept else empty
        self._kept.clear()
        return SimulatedRows(self._schedule, self.routes, matrix).in_order()


def ended_row(live: Live, phase: int, now_s: float, route: int, *, from_prefill: bool) -> Row:
    """What is told of a placed request that ends now, in the order of ``FIELDS``."""
    started, prefilled, landed, nan = live.started, live.prefilled, live.landed, math.nan
    first_s = second_s = granted_s = nan
    if not phase:
        granted_s = live.granted_s
        first_s = live.end_s + live.back_s if from_prefill else granted_s
        if live.output_tokens > 1:
            second_s = live.second_s
    return (
        live.number,
        phase,
        route,
        live.kv_bytes if started else nan,
        live.cached_tokens,
        live.fetched_tokens,
        live.resident_tokens,
        live.planned_s,
        live.hop_s,
        live.start_s if started else nan,
        live.service_s if prefilled else nan,
        live.end_s if prefilled else nan,
        live.landed_s if landed else nan,
        granted_s,
        first_s,
        second_s,
        now_s,
        live.placed_s,
        live.retries,
    )


def rejected_row(number: int, planned_s: float, now_s: float, retries: int) -> Row:
    """Of one that was refused, at once or when it was to be placed again."""
    nothing, nan = (math.nan,) * 7, math.nan
    code = PHASE_CODES["rejected"]
    return (
        number, code, NO_ROUTE, nan, 0, 0, 0, planned_s, 0.0, *nothing, now_s, now_s, retries
    )  # fmt: skip
