"""Whether a request is taken in: a bounded number in flight, a bounded expected wait.

A request that would have to wait too long is refused early, when the client can still go elsewhere,
and is told when it may be worth coming again:

    in flight >= max_queue_requests                 retry after a fixed time
    expected prefill start - now > max_wait_s       retry after the excess

The wait counts what stands ahead of the request and the way to the instance, not its own fetch or
copy of a prefix.
"""

from dataclasses import dataclass

from harness.settings import Scheduling


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken in, and after how long it may be."""

    reason: str
    retry_after_s: float
    #: Nothing is up that could serve it.
    unavailable: bool = False


def refused_by_count(in_flight: int, limits: Scheduling, retry_after_s: float) -> Refusal | None:
    """Refused before anything is looked at, when there are too many already."""
    if in_flight < limits.max_queue_requests:
        return None
    return Refusal(
        f"{in_flight} requests are in flight, and scheduling.max_queue is "
        f"{limits.max_queue_requests}",
        retry_after_s,
    )


def refused_by_wait(start_s: float, now_s: float, limits: Scheduling) -> Refusal | None:
    """Refused once placed, when the expected prefill start is too far off."""
    if limits.max_wait_s is None:
        return None
    excess_s = start_s - now_s - limits.max_wait_s
    if excess_s <= 0:
        return None
    return Refusal(
        f"prefill would start in {start_s - now_s:.3g} s, and scheduling.max_wait is "
        f"{limits.max_wait_s:g} s",
        excess_s,
    )
