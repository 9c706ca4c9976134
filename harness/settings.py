"""The records a scenario is made of, as resolved: base units, files read, no defaults.

Times are scenario seconds, sizes scenario bytes; ``Scale`` gives wall time and wire bytes. The TOML
form, where units and defaults live, is ``harness.scenario_file``.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.architecture import Architecture
from harness.profile import Extrapolation, Profile
from harness.trace import Selection, TraceFormat


@dataclass(frozen=True, slots=True)
class Model:
    """The model that is served; its name is the architecture file's."""

    name: str
    architecture: Architecture
    weights_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Hardware:
    """One kind of instance; ``relative_price`` is per GPU, where no price in USD is known."""

    name: str
    profile: Profile
    price_usd_per_gpu_hour: float | None
    relative_price: float | None

    @property
    def extrapolate(self) -> Extrapolation | None:
        """How the profile goes on beyond its points; None: it does not."""
        return self.profile.extrapolate


@dataclass(frozen=True, slots=True)
class RateState:
    """A state of the rate; its multiple counts relative to those of the others."""

    rate_multiple: float
    mean_duration_s: float


@dataclass(frozen=True, slots=True)
class RateShape:
    """Multiples of the rate at instants of the run, ascending, relative to each other.

    ``linear``: between them on a line, else each holds until the next; the first holds before and
    the last one after. With ``period_s`` all begins again.
    """

    time_s: tuple[float, ...]
    multiples: tuple[float, ...]
    linear: bool
    period_s: float | None


@dataclass(frozen=True, slots=True)
class Sessions:
    """Requests as turns of sessions (``harness.workload.sessions``). Without ``increment_sigma``
    every increment has ``increment_tokens`` tokens."""

    turns: float
    turns_law: Literal["geometric", "fixed"]
    think_time_s: float
    think_cv: float
    increment_tokens: int
    increment_sigma: float | None
    increment_min_tokens: int
    increment_max_tokens: int
    shared_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """What requests look like and how they arrive.

    With a ``trace``, ``mu`` and ``sigma`` are None, the bounds are what the replayed part holds,
    ``output_tokens`` is its rounded mean, and arrivals and ``cv`` mean nothing; ``selection`` says
    which part, and ``left_out`` and ``clipped`` how many requests and lengths of it were touched,
    by why. Without ``output_sigma`` every output has ``output_tokens`` tokens. ``rate_scale`` is
    already in ``Load.rate_req_per_s``.
    """

    mu: float | None
    sigma: float | None
    min_tokens: int
    max_tokens: int
    output_tokens: int
    output_sigma: float | None
    output_min_tokens: int
    output_max_tokens: int
    arrivals: Literal["gamma", "weibull", "on_off", "mmpp"]
    cv: float
    on_duration_s: float | None
    off_duration_s: float | None
    on_rate_multiple: float | None
    states: tuple[RateState, ...]
    shape: RateShape | None
    sessions: Sessions | None
    trace: Path | None
    trace_format: TraceFormat | None
    trace_sha256: str | None
    selection: Selection | None
    left_out: dict[str, int]
    clipped: dict[str, int]
    rate_scale: float


@dataclass(frozen=True, slots=True)
class Load:
    """Offered load; for a trace ``rate_req_per_s`` is the mean rate of the replayed part.

    ``duration_s``, where given, bounds a synthetic run instead of ``num_requests``. Of a trace it
    takes the first seconds of trace time, that is, before ``rate_scale`` compresses them.

    With ``concurrency`` the loop is closed: so many requests are in flight, the next of the
    schedule leaves ``think_time_s`` after one has ended, whatever became of it. Every ``planned_s``
    is 0 then and ``rate_req_per_s`` is infinite (null in a manifest), since no rate bounds it.
    """

    rate_req_per_s: float
    num_requests: int | None
    duration_s: float | None
    seed: int
    concurrency: int | None
    think_time_s: float
    workers: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """Cached prefixes as the planner takes them; those of a run are in pools (``PrefixCache``).

    ``share``: a share ``agent_share`` of the requests finds ``cached_fraction`` of its prompt
    cached. ``trace``: what an unlimited prefix cache would have held of each request of a trace
    with hash ids. Cached means at every place that computes or receives the prefix.
    """

    model: Literal["none", "share", "trace"]
    agent_share: float
    cached_fraction: float


@dataclass(frozen=True, slots=True)
class Cost:
    """Prices of the link, in the unit of the hardware's prices; both parts add up."""

    link_price_per_gb: float
    link_price_per_gbps_month: float


@dataclass(frozen=True, slots=True)
class Slo:
    tpot_s: float
    ttft_s: float | None


@dataclass(frozen=True, slots=True)
class Scale:
    """wall seconds = scenario seconds / time; wire bytes = KV bytes / bytes."""

    time: float
    bytes: float


@dataclass(frozen=True, slots=True)
class Fabric:
    """The network inside a cluster, per sending instance."""

    rate_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How requests are placed. Which mechanism reads which key: docs/scheduling.md.

    ``max_wait_s``: a request whose prefill would start later than that is refused with 429 at once.
    ``max_queue_requests`` bounds the requests in flight. ``cache_staleness_s`` is how old the
    simulator lets cache and link reports become; live ones are as old as their way takes.
    """

    admission: Literal["push_then_admit", "reserve_first"]
    ttft_source: Literal["decode", "prefill"]
    admission_deadline_s: float
    cache_aware: bool
    cache_copy: bool
    bandwidth_aware: bool
    role_conversion: bool
    control_period_s: float
    demand_window_s: float
    link_target: float
    role_period_s: float
    conversion_s: float
    cache_staleness_s: float
    max_wait_s: float | None
    max_queue_requests: int


@dataclass(frozen=True, slots=True)
class PrefixCache:
    """The pool of each instance; ``memory_bytes`` of it, the scenario's bytes.

    ``checkpoint_tokens``: a state is kept every so many tokens, and at the last full block.
    """

    enabled: bool
    block_tokens: int
    checkpoint_tokens: int
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class Serving:
    """How instances serve. None: no bound of memory, one prompt at a time, prompts uncut."""

    decode_steps: Literal["full_batch", "by_batch"]
    decode_memory_bytes: float | None
    prefill_batch_tokens: int | None
    chunk_tokens: int | None


@dataclass(frozen=True, slots=True)
class Transport:
    """KV transfer. ``chunk_bytes`` is in wire bytes, ``pacing_bytes_per_s`` in scenario units."""

    connections: int
    layerwise: bool
    checksum: bool
    chunk_bytes: int
    striping: Literal["chunked", "whole"]
    congestion_control: str | None
    pacing_bytes_per_s: float | None
    io_threads: int


@dataclass(frozen=True, slots=True)
class Testbed:
    """How the live run is built. ``request_timeout_s`` is scenario time like every ``_s``."""

    stream_interval_tokens: int
    link_backend: Literal["auto", "netem", "forwarder", "relay"]
    gateway_port: int
    realtime: bool
    request_timeout_s: float
    self_test: bool


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long a phase of a request may last in the gateway; None: as long as the whole request.

    A queue may rightly hold a request for as long as its client waits, so only what cannot be a
    queue must have a bound of its own: answering a connection, and the next token.
    """

    connect_wall_s: float
    prefill_queue_s: float | None
    prefill_s: float | None
    transfer_s: float | None
    decode_admission_s: float | None
    between_tokens_s: float


@dataclass(frozen=True, slots=True)
class Gateway:
    """The live gateway. ``tokenizer`` is a ``tokenizer.json``; ``max_retries``: placements after
    the first. The key in ``api_key_file`` is read by whoever needs it, so that no record has it."""

    timeouts: Timeouts
    max_retries: int
    max_body_bytes: int
    tokenizer: Path | None
    tokenizer_sha256: str | None
    api_key_file: Path | None


@dataclass(frozen=True, slots=True)
class InstanceFault:
    """An instance dies (``kill``), or is slow by ``factor``, from ``at_s`` on for ``lasts_s``
    (None: for good), in ``deployments`` (None: all that have it)."""

    instance: str
    kind: Literal["kill", "slow"]
    at_s: float
    lasts_s: float | None
    factor: float | None
    deployments: tuple[str, ...] | None

    @property
    def until_s(self) -> float:
        return math.inf if self.lasts_s is None else self.at_s + self.lasts_s


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong by schedule."""

    instances: tuple[InstanceFault, ...] = ()

    def of(self, deployment: str) -> tuple[InstanceFault, ...]:
        """Those that a deployment is asked to have; not each may be of an instance of its own."""
        return tuple(
            one
            for one in self.instances
            if one.deployments is None or deployment in one.deployments
        )
