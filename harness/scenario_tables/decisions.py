"""How requests are placed, and what prefixes instances keep."""

from typing import Annotated, Literal

from pydantic import Field

from harness.deployment import Balancing
from harness.scenario_tables.table import Table
from harness.scenario_values import (
    ByteSize,
    Count,
    Duration,
    Name,
    PositiveDuration,
    Rate,
    StateDuration,
)


class SchedulingTable(Table):
    admission: Literal["push_then_admit", "reserve_first"] = "push_then_admit"
    """When decode reserves KV: after it has landed, or before prefill starts."""
    ttft_source: Literal["decode", "prefill"] = "decode"
    """Who sends the first token to the client."""
    admission_deadline: PositiveDuration = Field(default="60s", validate_default=True)
    """A request that waits longer for a decode slot fails."""
    cache_aware: bool = True
    """Placement knows what prefixes the pools hold (with prefix_cache.enabled)."""
    cache_copy: bool = True
    """With bandwidth to spare a prefix is copied to the cluster that computes, where it pays."""
    bandwidth_aware: bool = True
    """The threshold rises where the link or PrfaaS cannot carry what it offloads."""
    role_conversion: bool = False
    """Instances of the PD cluster change role when one stage is short for minutes."""
    control_period: StateDuration = Field(default="1s", validate_default=True)
    """Time between two decisions about link and threshold."""
    demand_window: PositiveDuration = Field(default="120s", validate_default=True)
    """Arrivals of so long a time stand for the demand."""
    link_target: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the link that offloaded demand may fill."""
    role_period: StateDuration = Field(default="60s", validate_default=True)
    """Time between two decisions about roles."""
    conversion: PositiveDuration = Field(default="10s", validate_default=True)
    """Time an instance is out of service to change its role, after it has drained."""
    cache_staleness: Duration = Field(default="100ms", validate_default=True)
    """Age of what the scheduler knows of pools and link, in simulation."""
    max_wait: PositiveDuration | None = None
    """A request that would wait longer for prefill is refused with 429; no bound unless given."""
    max_queue: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Most requests in flight; further ones are refused with 429."""


class PrefixCacheTable(Table):
    """Off unless enabled: the paper's case study counts uncached lengths."""

    enabled: bool = False
    """Every instance keeps the prefixes it has computed or received."""
    block_tokens: Annotated[int, Field(ge=1, le=65536)] = 512
    """Tokens of a block; only full blocks are reused."""
    checkpoint_tokens: Annotated[int, Field(ge=1, le=2**24)] = 4096
    """Spacing of the states kept of linear and sliding-window layers."""
    memory: ByteSize = Field(default="128GiB", validate_default=True)
    """Memory of an instance for cached prefixes and KV in transfer. No profile states one."""


class PrfaasClusterTable(Table):
    """A further PrfaaS cluster with an egress link of its own."""

    hardware: Name
    num_instances: Annotated[int, Field(ge=1, le=1024)]
    link_rate: Rate


class PdClusterTable(Table):
    """A further PD cluster with an ingress link of its own."""

    hardware: Name
    num_prefill: Count = 0
    num_decode: Annotated[int, Field(ge=1, le=1024)]
    link_rate: Rate


class DeploymentTable(Table):
    threshold_tokens: Annotated[int, Field(ge=0, le=2**24)] | None = None
    """Longer prompts are prefilled by PrfaaS (t)."""
    balancing: Balancing = "threshold"
    """By length, or ("capacity") to whichever cluster is expected to be done first."""
    num_prfaas: Count = 0
    num_prefill: Count = 0
    num_decode: Count
    prfaas_hardware: Name | None = None
    pd_hardware: Name
    more_prfaas: list[PrfaasClusterTable] = Field(default_factory=list, max_length=64)
    """Further clusters are planned and simulated; bench refuses them."""
    more_pd: list[PdClusterTable] = Field(default_factory=list, max_length=64)
