"""What is asked of the system: model, hardware, workload, load, cost and SLO."""

from typing import Annotated, Literal

from pydantic import Field

from harness.attention import DEFAULT_KV_DTYPE, KvDtype
from harness.scenario_tables.table import Table
from harness.scenario_values import (
    ByteSize,
    Duration,
    FreePrice,
    PathText,
    PositiveDuration,
    Price,
    Share,
    StateDuration,
    Tokens,
)

MAX_REQUESTS = 1_000_000
#: Keys of [load] and [workload] that only a load with a rate has.
OPEN_LOOP_KEYS = ("rate_req_per_s", "duration")
ARRIVAL_KEYS = (
    "arrivals",
    "cv",
    "on_duration",
    "off_duration",
    "on_rate_multiple",
    "states",
    "shape",
    "rate_scale",
    "trace_time_scale",
)
#: Sockets and greenlets of one host.
MAX_CONCURRENCY = 65_536


class ModelTable(Table):
    architecture: PathText
    """Architecture file (JSON), relative to the scenario file."""
    kv_dtype: KvDtype = DEFAULT_KV_DTYPE
    """Type of the KV that is held and moved; a recurrent state is fp32 with either."""
    weights: ByteSize | None = None
    """Bytes of the weights as they are loaded, "315GB"; with nodes, whether they fit."""


class HardwareTable(Table):
    profile: PathText
    """Profile file (JSON), relative to the scenario file."""
    price_usd_per_gpu_hour: Price | None = None
    relative_price: Price | None = None
    """Price per GPU in any unit, where none in USD is known; only ratios count."""
    extrapolate: Literal["end_slope"] | None = None
    """How prefill costs go on beyond the profile's points; left out, such lengths are refused."""


_Multiple = Annotated[float, Field(ge=0, le=1000)]


class RateStateTable(Table):
    rate_multiple: _Multiple
    """Rate in this state relative to that in the others."""
    mean_duration: StateDuration
    """Mean of the exponential time in this state; then any other one follows, alike likely."""


class ShapePointTable(Table):
    at: Duration
    multiple: _Multiple


class SpikeTable(Table):
    at: Duration
    lasts: StateDuration
    multiple: _Multiple
    """Rate in the spike relative to that outside of it."""


class DiurnalTable(Table):
    period: StateDuration
    peak_at: Duration
    swing: Share
    """The rate goes from 1 - swing to 1 + swing times its mean and back, as a sine."""


class ShapeTable(Table):
    """One of ``steps``, ``ramps``, ``spikes`` and ``diurnal``: how the rate changes in the run.
    Multiples count relative to each other; the mean over the run is that of the load."""

    steps: Annotated[list[ShapePointTable], Field(min_length=1, max_length=10_000)] | None = None
    """The rate jumps at each point; the first value holds before, the last one after."""
    ramps: Annotated[list[ShapePointTable], Field(min_length=2, max_length=10_000)] | None = None
    """The rate is linear between points, and as at the first and the last one outside."""
    spikes: Annotated[list[SpikeTable], Field(min_length=1, max_length=5_000)] | None = None
    diurnal: DiurnalTable | None = None
    repeat: StateDuration | None = None
    """Steps, ramps or spikes begin again after this time."""


class SessionsTable(Table):
    """Conversations or agents. ``mu`` to ``max_tokens`` are the first prompts' lengths and
    ``max_tokens`` bounds every prompt; load.rate_req_per_s counts turns."""

    turns: Annotated[float, Field(ge=1, le=1000)]
    """Turns of a session, on average."""
    turns_law: Literal["geometric", "fixed"] = "geometric"
    """geometric: at most ten times the mean. fixed: ``turns`` is whole."""
    think_time: Duration
    """Mean time between the planned times of two turns."""
    think_cv: Annotated[float, Field(ge=0, le=20)] = 1.0
    """Coefficient of variation of that time; 1 is exponential, 0 always the same."""
    increment_tokens: Tokens
    """New tokens of a later turn beside the reply before it, or their mean."""
    increment_sigma: Annotated[float, Field(gt=0, le=20)] | None = None
    """Increments are log-normal, cut to increment_min_tokens..increment_max_tokens."""
    increment_min_tokens: Tokens | None = None
    increment_max_tokens: Tokens | None = None
    shared_tokens: Annotated[int, Field(ge=0, le=2**24)] = 0
    """Beginning that all sessions share, in whole blocks of 512; less than min_tokens."""


class WorkloadTable(Table):
    """Either log-normal lengths (``mu`` to ``output_tokens``) or a ``trace``."""

    mu: Annotated[float, Field(ge=-50, le=50)] | None = None
    """Mean of ln(prompt tokens), before truncation."""
    sigma: Annotated[float, Field(ge=0, le=20)] | None = None
    """Standard deviation of ln(prompt tokens), before truncation."""
    min_tokens: Tokens | None = None
    max_tokens: Tokens | None = None
    output_tokens: Tokens | None = None
    """Output length, or its mean where output_sigma is given."""
    output_sigma: Annotated[float, Field(gt=0, le=20)] | None = None
    """Output lengths are log-normal, cut to output_min_tokens..output_max_tokens."""
    output_min_tokens: Tokens | None = None
    output_max_tokens: Tokens | None = None
    arrivals: Literal["gamma", "weibull", "on_off", "mmpp"] = "gamma"
    """gamma, weibull: renewals with such gaps. on_off, mmpp: gamma gaps, with a rate that changes
    between two states, or between ``states``."""
    cv: Annotated[float, Field(ge=0, le=20)] = 1.0
    """Coefficient of variation of the interarrival times; 1 is Poisson."""
    on_duration: StateDuration | None = None
    """Mean of the exponential time in the on state."""
    off_duration: StateDuration | None = None
    on_rate_multiple: Annotated[float, Field(ge=1, le=1000)] | None = None
    """Rate in the on state over the mean rate; the off rate follows from the mean."""
    states: Annotated[list[RateStateTable], Field(min_length=2, max_length=100)] | None = None
    shape: ShapeTable | None = None
    """How the rate changes in the course of the run, laid over any arrivals."""
    sessions: SessionsTable | None = None
    """Requests are turns of conversations, and each prompt begins with the one before it."""
    trace: PathText | None = None
    """Trace, relative to the scenario file; replaces the lengths and the arrivals. min_tokens,
    max_tokens, output_min_tokens and output_max_tokens then bound those of the trace."""
    trace_format: Literal["mooncake", "azure", "burstgpt", "servegen", "run"] | None = None
    trace_start: Duration | None = None
    """Trace time at which the replay begins."""
    trace_time_scale: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Divides the trace's times, by default like rate_scale, which keeps every request. Where it
    is more, requests are drawn from it so that the rate is still rate_scale times the trace's."""
    outside_bounds: Literal["drop", "clip"] | None = None
    """What becomes of a trace's request with a length outside the bounds; it is counted."""
    rate_scale: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Multiplies the arrival rate, of a trace too, and keeps the shape of its bursts."""


class LoadTable(Table):
    rate_req_per_s: Annotated[float, Field(ge=1e-6, le=1e5)] | None = None
    num_requests: Annotated[int, Field(ge=1, le=MAX_REQUESTS)] | None = None
    duration: PositiveDuration | None = None
    """Bounds the run by time (trace time for a trace); num_requests then has no effect."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    concurrency: Annotated[int, Field(ge=1, le=MAX_CONCURRENCY)] | None = None
    """Closed loop: so many requests in flight; completions decide when the next one leaves."""
    think_time: Duration | None = None
    """Closed loop: how long after one request has ended the next one leaves; 0s by default."""
    workers: Annotated[int, Field(ge=1, le=64)] = 1
    """Load processes that share the schedule, each a Locust worker; the records do not change."""


class PrefixTable(Table):
    """Cached prefixes, for the planner alone; bench and simulate have prefix_cache."""

    model: Literal["none", "share", "trace"] = "none"
    """share: agent_share and cached_fraction; trace: an unlimited cache over its hash ids."""
    agent_share: Share = Field(default="0%", validate_default=True)
    """Share of the requests that continue a conversation and find a prefix cached."""
    cached_fraction: Share = Field(default="80%", validate_default=True)
    """Share of such a request's prompt that is cached."""


class CostTable(Table):
    """What the link costs, in the unit of the hardware's prices: USD, or that of relative_price
    (then a GPU hour of relative_price 1). Both parts add up."""

    link_price_per_gb: FreePrice = 0.0
    """Per decimal GB that crosses."""
    link_price_per_gbps_month: FreePrice = 0.0
    """Per Gbit/s of link.rate and month of 730 hours, used or not."""


class SloTable(Table):
    tpot: PositiveDuration
    """Time per output token, (t_last - t_first) / (n - 1)."""
    ttft: PositiveDuration | None = None
