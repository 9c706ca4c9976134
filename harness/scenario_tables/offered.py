"""What is asked of the system: model, hardware, workload, load, cost and SLO."""

from typing import Annotated, Literal

from pydantic import Field

from harness.attention import DEFAULT_KV_DTYPE, KvDtype
from harness.scenario_tables.table import Table
from harness.scenario_values import (
    FreePrice,
    PathText,
    PositiveDuration,
    Price,
    Share,
    StateDuration,
    Tokens,
)

MAX_REQUESTS = 1_000_000


class ModelTable(Table):
    architecture: PathText
    """Architecture file (JSON), relative to the scenario file."""
    kv_dtype: KvDtype = DEFAULT_KV_DTYPE
    """Type of the KV that is held and moved; a recurrent state is fp32 with either."""


class HardwareTable(Table):
    profile: PathText
    """Profile file (JSON), relative to the scenario file."""
    price_usd_per_gpu_hour: Price | None = None
    relative_price: Price | None = None
    """Price per GPU in any unit, where none in USD is known; only ratios count."""
    extrapolate: Literal["end_slope"] | None = None
    """How prefill costs go on beyond the profile's points; left out, such lengths are refused."""


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
    arrivals: Literal["gamma", "on_off"] = "gamma"
    """gamma: renewals. on_off: the same, with a rate that alternates between two states."""
    cv: Annotated[float, Field(ge=0, le=20)] = 1.0
    """Coefficient of variation of the interarrival times; 1 is Poisson."""
    on_duration: StateDuration | None = None
    """Mean of the exponential time in the on state."""
    off_duration: StateDuration | None = None
    on_rate_multiple: Annotated[float, Field(ge=1, le=1000)] | None = None
    """Rate in the on state over the mean rate; the off rate follows from the mean."""
    trace: PathText | None = None
    """Trace file, relative to the scenario file; replaces the lengths and the arrivals."""
    trace_format: Literal["mooncake", "azure"] | None = None
    rate_scale: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Multiplies the arrival rate, of a trace too, and keeps the shape of its bursts."""


class LoadTable(Table):
    rate_req_per_s: Annotated[float, Field(gt=0, le=1e5)] | None = None
    num_requests: Annotated[int, Field(ge=1, le=MAX_REQUESTS)] | None = None
    duration: PositiveDuration | None = None
    """Bounds the run by time (trace time for a trace); num_requests then has no effect."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]


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
