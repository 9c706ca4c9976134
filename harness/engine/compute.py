"""What computes behind the KV ends: planned time (``emulated``) or a model in torch.

A prefill backend takes a prompt, hands over each layer's bytes when they are final, tells the first
token, and leaves the bytes as they are until the job is released. A decode backend takes the KV
that landed and then gives tokens. Both serve many requests and tell how busy they are.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from harness.prefix_pool import PrefixPool
from harness.surface.generate import PrefillSpan
from harness.transport.receiver import Received


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of a layer that are final, in the order in which they lie: from ``first_byte`` of all
    that the prompt leaves in the layer. ``data`` None: the whole layer, whatever its bytes."""

    layer: int
    first_byte: int = 0
    data: memoryview | None = None
    is_last: bool = True


@dataclass(frozen=True, slots=True)
class Work:
    """What a prefill takes, in scenario seconds: ``service_s``, of which nothing is computed in the
    first ``fetch_s``. It does not start before ``ready_mono_ns``."""

    service_s: float
    fetch_s: float = 0.0
    cached_tokens: int = 0
    fetched_tokens: int = 0
    ready_mono_ns: int = 0


#: Called at a job's turn with (new_tokens, cached_tokens) -> seconds.
Begin = Callable[[Callable[[int, int], float]], Coroutine[None, None, Work]]


def _no_ids() -> Sequence[int]:
    raise AssertionError("this job's prompt has no ids")


def _unheard(_token: int) -> None:
    pass


@dataclass(eq=False, slots=True)
class PrefillJob:
    """One request at a prefill instance; ``emit`` takes each layer's bytes when they are final, and
    ``on_token`` the first token when it is known.

    ``begin`` says what there is to do; None: all of the prompt is computed. ``shares`` is when of
    its compute each layer is final, 0 to 1 and ascending; empty: evenly spaced. ``digest`` is a
    hash of the prompt, whose ids ``read_ids`` gives and whose full blocks have ``keys``.
    """

    tokens: int
    received_mono_ns: int
    ready_mono_ns: int
    num_layers: int
    emit: Callable[[Piece], None]
    on_start: Callable[[], None]
    begin: Begin | None = None
    shares: Sequence[float] = ()
    digest: int = 0
    keys: Sequence[int] = ()
    read_ids: Callable[[], Sequence[int]] = _no_ids
    on_token: Callable[[int], None] = _unheard
    done: asyncio.Future[PrefillSpan] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


async def begun(job: PrefillJob, prefill_s: Callable[[int, int], float]) -> Work | None:
    """What the job takes; None when its request ended while it waited for room."""
    if job.begin is None:
        return Work(prefill_s(job.tokens, 0))
    beginning = asyncio.create_task(job.begin(prefill_s))
    try:
        either: set[asyncio.Future[Any]] = {beginning, job.done}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        beginning.cancel()
    await asyncio.gather(beginning, return_exceptions=True)
    if job.done.done() or beginning.cancelled():
        return None
    return beginning.result()


class PrefillBackend(Protocol):
    """A prefill instance's compute."""

    running: PrefillJob | None
    busy_s: float

    @property
    def queued(self) -> int: ...

    def release_shares(self, tokens: int, layer_bytes: Sequence[int]) -> tuple[float, ...]:
        """When of its compute each layer is planned to be final; empty: nobody knows."""

    async def prefill(self, job: PrefillJob) -> PrefillSpan:
        """Serve ``job`` in its turn. Cancelling the caller ends it between two layers."""

    def keep(self, job: PrefillJob, pool: PrefixPool) -> None:
        """The pool has just decided what is kept of a job that has been computed."""

    def release(self, job: PrefillJob) -> None:
        """The job's pieces are not read any more; said once of each job, whatever became of it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A prompt whose KV has landed. Growing KV of its first ``resident_tokens`` lay there before
    and is what ``DecodeBackend.resident`` found; ``got`` holds the rest, and may be released after
    ``DecodeBackend.place``. ``keys`` are of the full blocks that may be kept."""

    tokens: int
    output_tokens: int
    digest: int
    first_token: int
    got: Received
    resident_tokens: int = 0
    resident: object = None
    keys: Sequence[int] = ()


class Placed(Protocol):
    """A request in its decode slot. Ends with ``decode`` or, before that, with ``drop``."""

    def tokens(self, start: int, end: int) -> list[int]:
        """Generated tokens by position; 0 is the first, which prefill computed."""

    async def decode(
        self,
        granted_mono_ns: int,
        output_tokens: int,
        emit: Callable[[int], Awaitable[None]],
        context_tokens: int,
    ) -> float:
        """Call ``emit(total)`` as tokens come; gives the worst lateness in wall seconds. The slot
        is released at the end, whatever happens."""

    def keep(self, pool: PrefixPool) -> None:
        """The pool has just decided what is kept of the prompt; before anything is decoded."""

    def drop(self) -> None:
        """It is not decoded; whoever granted the slot releases it."""


class Places(Protocol):
    """A decode instance's slots, granted first come first served."""

    running: int

    @property
    def queued(self) -> int: ...

    async def grant(self, ready_mono_ns: int, tokens: int = 0) -> int: ...

    def release(self, planned_mono_ns: int, tokens: int = 0) -> None: ...


class DecodeBackend(Protocol):
    """A decode instance's compute."""

    busy_s: float

    @property
    def slots(self) -> Places: ...

    async def until(self, mono_ns: int) -> None:
        """Return at a planned instant."""

    def resident(self, keys: Sequence[int], tokens: int) -> object:
        """What lies in the cluster of a prompt's beginning, for ``place``, whatever is evicted
        meanwhile."""

    async def place(self, arrival: Arrival) -> Placed:
        """Take the KV of a request that has been granted a slot."""
