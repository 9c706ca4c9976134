"""A decision as a line of the decisions' spool: the action and everything it was made from.

What ``scheduling.router.groups`` and the choice of instances look at stands in the row, so that
both can be asked again and must answer the same. Rows are written some milliseconds later, in
order: a request on its way to its instance does not wait for the file.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from harness.child import Spool
from harness.scheduling import events as ev

#: Far longer than it takes to hand a request over, wall time.
WRITE_AFTER_S = 0.005
Row = dict[str, object]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as the scheduler was asked about it, how long each prefill instance was busy then,
    and how many requests each instance had."""

    mono_ns: int
    rid: str
    attempt: int
    now_s: float
    input_tokens: int
    output_tokens: int
    num_keys: int
    waits_s: Mapping[str, float]
    assigned: Mapping[str, int]


_Placed = tuple[Asked, ev.Dispatch | ev.Reject, Mapping[str, float]]


class DecisionLog:
    """Context manager around the spool: what is still to be written is, when it ends."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._rows: list[_Placed | Row] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.flush()

    def placed(
        self, asked: Asked, action: ev.Dispatch | ev.Reject, slots_s: Mapping[str, float]
    ) -> None:
        self._add((asked, action, slots_s))

    def changed(self, action: ev.SetThreshold | ev.Convert | ev.Resync, now_s: float) -> None:
        self._add(control_row(action, now_s))

    def _add(self, row: _Placed | Row) -> None:
        if not self._rows:
            asyncio.get_running_loop().call_later(WRITE_AFTER_S, self.flush)
        self._rows.append(row)

    def flush(self) -> None:
        """Write what is still to be written."""
        rows, self._rows = self._rows, []
        self._spool.write_all(row if isinstance(row, dict) else row_of(*row) for row in rows)


def row_of(asked: Asked, action: ev.Dispatch | ev.Reject, slots_s: Mapping[str, float]) -> Row:
    """The row of a placement or a refusal; ``slots_s`` is what decode instances had to offer."""
    row: Row = {
        "mono_ns": asked.mono_ns,
        "rid": asked.rid,
        "attempt": asked.attempt,
        "now_s": asked.now_s,
        "input_tokens": asked.input_tokens,
        "output_tokens": asked.output_tokens,
        "block_keys": asked.num_keys,
        "waits_s": asked.waits_s,
        "assigned": asked.assigned,
    }
    if isinstance(action, ev.Reject):
        return row | {
            "action": "reject",
            "reason": action.reason,
            "retry_after_s": action.retry_after_s,
        }
    return row | {"slots_s": slots_s} | _placement(action)


def _placement(action: ev.Dispatch) -> Row:
    row: Row = {
        "action": "dispatch",
        "uncached_tokens": action.uncached_tokens,
        "cached_tokens": action.cached_tokens,
        "resident_tokens": action.resident_tokens,
        "hit_tokens": dict(action.hit_tokens),
        "threshold_tokens": action.threshold_tokens,
        "link_scarce": action.link_scarce,
        "link_up": action.link_up,
        "roomy": action.roomy,
        "considered_s": action.considered_s,
        "prefill_instance": action.route.prefill.name,
        "decode_instance": action.route.decode.name,
        "prefill_service_s": action.prefill_service_s,
        "expected_prefill_start_s": action.expected_prefill_start_s,
        "expected_kv_landed_s": action.expected_kv_landed_s,
        "expected_decode_slot_s": action.expected_decode_slot_s,
        "fetched_tokens": action.fetched_tokens,
        "fetch_from": action.fetch_from,
        "fetch_s": action.fetch_s,
    }
    if action.copy is not None:
        row |= {
            "copy_from": action.copy.source,
            "copy_to": action.copy.destination,
            "copied_tokens": action.copy.tokens,
            "copied_bytes": action.copy.kv_bytes,
            "copy_s": action.copy_s,
        }
    return row


def control_row(action: ev.SetThreshold | ev.Convert | ev.Resync, now_s: float) -> Row:
    """The row of what no request asked for."""
    row: Row = {"mono_ns": time.monotonic_ns(), "now_s": now_s}
    match action:
        case ev.SetThreshold():
            return row | {
                "action": "set_threshold",
                "threshold_tokens": action.threshold_tokens,
                "reason": action.reason,
            }
        case ev.Convert():
            return row | {"action": "convert", "instance": action.instance, "reason": action.role}
        case ev.Resync():
            return row | {"action": "resync", "instance": action.instance}
