"""The TOML form of a scenario: its keys, units and defaults, and ``--set`` overrides.

Quantities with a unit are text ("100gbit", "0.8ms", "0.1%", "256KiB") and become base units here.
A key that is not listed is an error that names the nearest one. No path is opened here except the
scenario file itself. Defaults live in these classes and nowhere else.
"""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from harness.attention import DEFAULT_KV_DTYPE, KvDtype
from harness.core import ScenarioError
from harness.datafile import explain, printable, read_text_file
from harness.deployment import Balancing
from harness.scenario_values import (
    BodySize,
    ByteSize,
    ChunkSize,
    Count,
    Duration,
    FreePrice,
    Loss,
    Name,
    PathText,
    PositiveDuration,
    Price,
    Rate,
    Share,
    StateDuration,
    Tokens,
)

MAX_REQUESTS = 1_000_000
MAX_OVERRIDES = 1000


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ModelTable(_Table):
    architecture: PathText
    """Architecture file (JSON), relative to the scenario file."""
    kv_dtype: KvDtype = DEFAULT_KV_DTYPE
    """Type of the KV that is held and moved; a recurrent state is fp32 with either."""


class HardwareTable(_Table):
    profile: PathText
    """Profile file (JSON), relative to the scenario file."""
    price_usd_per_gpu_hour: Price | None = None
    relative_price: Price | None = None
    """Price per GPU in any unit, where none in USD is known; only ratios count."""
    extrapolate: Literal["end_slope"] | None = None
    """How prefill costs go on beyond the profile's points; left out, such lengths are refused."""


class WorkloadTable(_Table):
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


class LoadTable(_Table):
    rate_req_per_s: Annotated[float, Field(gt=0, le=1e5)] | None = None
    num_requests: Annotated[int, Field(ge=1, le=MAX_REQUESTS)] | None = None
    duration: PositiveDuration | None = None
    """Bounds the run by time (trace time for a trace); num_requests then has no effect."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]


class PrefixTable(_Table):
    """Cached prefixes, for the planner alone; bench and simulate have prefix_cache."""

    model: Literal["none", "share", "trace"] = "none"
    """share: agent_share and cached_fraction; trace: an unlimited cache over its hash ids."""
    agent_share: Share = Field(default="0%", validate_default=True)
    """Share of the requests that continue a conversation and find a prefix cached."""
    cached_fraction: Share = Field(default="80%", validate_default=True)
    """Share of such a request's prompt that is cached."""


class CostTable(_Table):
    """What the link costs, in the unit of the hardware's prices: USD, or that of relative_price
    (then a GPU hour of relative_price 1). Both parts add up."""

    link_price_per_gb: FreePrice = 0.0
    """Per decimal GB that crosses."""
    link_price_per_gbps_month: FreePrice = 0.0
    """Per Gbit/s of link.rate and month of 730 hours, used or not."""


class SloTable(_Table):
    tpot: PositiveDuration
    """Time per output token, (t_last - t_first) / (n - 1)."""
    ttft: PositiveDuration | None = None


class ScaleTable(_Table):
    time: Annotated[float, Field(ge=1, le=1000)] = 10.0
    """Wall seconds = scenario seconds / time."""
    bytes: Annotated[float, Field(ge=1, le=1e6)] = 1000.0
    """Wire bytes = KV bytes / bytes."""


class LinkTable(_Table):
    """A named profile, a link file, or ``rate`` and ``rtt``; keys beside a profile or a file
    replace its values in both directions."""

    profile: Name | None = None
    file: PathText | None = None
    """A link file (see netem/link_file.py): each direction its own, loss in bursts and more."""
    rate: Rate | None = None
    rtt: Duration | None = None
    """Round trip; each direction delays by half of it."""
    jitter: Duration | None = None
    loss: Loss | None = None
    limit_packets: Annotated[int, Field(ge=1, lt=2**32)] | None = None
    per_flow_cap: Rate | None = None
    """What one connection gets at most, each way."""
    vary: bool = False
    """Run the variation of the profile or file: bursts, dips, the time of day."""
    schedule: PathText | None = None
    """A file of changes (TOML or CSV), in scenario time from the start of the load."""


class FabricTable(_Table):
    rate: Rate = Field(default="400gbit", validate_default=True)
    """Rate of the network inside a cluster, per sending instance."""


class SchedulingTable(_Table):
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
    control_period: PositiveDuration = Field(default="1s", validate_default=True)
    """Time between two decisions about link and threshold."""
    demand_window: PositiveDuration = Field(default="120s", validate_default=True)
    """Arrivals of so long a time stand for the demand."""
    link_target: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the link that offloaded demand may fill."""
    role_period: PositiveDuration = Field(default="60s", validate_default=True)
    """Time between two decisions about roles."""
    conversion: PositiveDuration = Field(default="10s", validate_default=True)
    """Time an instance is out of service to change its role, after it has drained."""
    cache_staleness: Duration = Field(default="100ms", validate_default=True)
    """Age of what the scheduler knows of pools and link, in simulation."""
    max_wait: PositiveDuration | None = None
    """A request that would wait longer for prefill is refused with 429; no bound unless given."""
    max_queue: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Most requests in flight; further ones are refused with 429."""


class PrefixCacheTable(_Table):
    """Off unless enabled: the paper's case study counts uncached lengths."""

    enabled: bool = False
    """Every instance keeps the prefixes it has computed or received."""
    block_tokens: Annotated[int, Field(ge=1, le=65536)] = 512
    """Tokens of a block; only full blocks are reused."""
    checkpoint_tokens: Annotated[int, Field(ge=1, le=2**24)] = 4096
    """Spacing of the states kept of linear and sliding-window layers."""
    memory: ByteSize = Field(default="128GiB", validate_default=True)
    """Memory of an instance for cached prefixes and KV in transfer. No profile states one."""


class TransportTable(_Table):
    connections: Annotated[int, Field(ge=1, le=64)] = 4
    layerwise: bool = True
    """KV leaves layer by layer during prefill, not all at its end."""
    checksum: bool = True
    chunk_bytes: ChunkSize = Field(default="256KiB", validate_default=True)
    """Most bytes of one frame, on the wire."""
    striping: Literal["chunked", "whole"] = "chunked"
    """Whether a layer's frames go to whichever connection takes them, or all to one."""
    congestion_control: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,15}$")] | None = None
    """Of every KV connection, as the kernel names it; the kernel's default unless given."""
    pacing: Rate | None = None
    """What a prefill instance of a PrfaaS cluster sends at most to one decode instance."""
    io_threads: Annotated[int, Field(ge=1, le=64)] = 1
    """Threads of each worker process that move KV; one carries 2 to 3 GB/s."""


class PrfaasClusterTable(_Table):
    """A further PrfaaS cluster with an egress link of its own."""

    hardware: Name
    num_instances: Annotated[int, Field(ge=1, le=1024)]
    link_rate: Rate


class PdClusterTable(_Table):
    """A further PD cluster with an ingress link of its own."""

    hardware: Name
    num_prefill: Count = 0
    num_decode: Annotated[int, Field(ge=1, le=1024)]
    link_rate: Rate


class DeploymentTable(_Table):
    threshold_tokens: Annotated[int, Field(ge=0, le=2**24)] | None = None
    """Longer prompts are prefilled by PrfaaS (t)."""
    balancing: Balancing = "threshold"
    """By length, or ("capacity") to whichever cluster is expected to be done first."""
    num_prfaas: Count = 0
    num_prefill: Count = 0
    num_decode: Count
    prfaas_hardware: Name | None = None
    pd_hardware: Name
    more_prfaas: Annotated[list[PrfaasClusterTable], Field(max_length=64)] = []
    """Further clusters are planned by prfaas plan; bench and simulate refuse them."""
    more_pd: Annotated[list[PdClusterTable], Field(max_length=64)] = []


class TestbedTable(_Table):
    stream_interval_tokens: Annotated[int, Field(ge=1, le=65536)] = 64
    """Tokens put together in one streamed chunk, after the second token."""
    link_backend: Literal["auto", "netem", "forwarder", "relay"] = "auto"
    gateway_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 picks a free port."""
    realtime: bool = True
    """Ask for a real-time priority for workers, gateway and load; root gets it."""
    request_timeout: PositiveDuration = Field(default="600s", validate_default=True)
    """In scenario time, like every duration here."""


class GatewayTable(_Table):
    """Limits of the live gateway, in scenario time unless they say otherwise. A simulation has none
    of them; a phase without a limit may last as long as testbed.request_timeout."""

    connect_timeout_wall: PositiveDuration = Field(default="5s", validate_default=True)
    """Most time for a connection to a worker, in wall time: no scenario makes a process slow."""
    prefill_queue_timeout: PositiveDuration | None = None
    """Most time between a request's way to its prefill instance and the start of its prefill."""
    prefill_timeout: PositiveDuration | None = None
    transfer_timeout: PositiveDuration | None = None
    """Most time from the end of prefill until all KV is acknowledged."""
    decode_admission_timeout: PositiveDuration | None = None
    """Most time from there until the first token of the decode instance."""
    between_tokens_timeout: PositiveDuration = Field(default="60s", validate_default=True)
    """Most time between two chunks, of which one has testbed.stream_interval_tokens tokens."""
    max_retries: Annotated[int, Field(ge=0, le=100)] = 2
    """Placements after the first, of a request whose instance was lost before its first token."""
    max_body: BodySize = Field(default="16MiB", validate_default=True)
    """Longest body of a request; a longer one is refused with 413."""
    tokenizer: PathText | None = None
    """A tokenizer.json, relative to the scenario file, for prompts that come as text."""
    api_key_file: PathText | None = None
    """File with the key that clients must show, relative to the scenario file; a key is drawn for
    each run unless given. The key itself is never recorded."""


class ScenarioFile(_Table):
    """A whole scenario file."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] | None = None
    model: ModelTable
    hardware: Annotated[dict[str, HardwareTable], Field(min_length=1, max_length=16)]
    workload: WorkloadTable
    prefix: PrefixTable = Field(default_factory=PrefixTable)
    load: LoadTable
    slo: SloTable
    scale: ScaleTable = Field(default_factory=ScaleTable)
    link: LinkTable
    fabric: FabricTable = Field(default_factory=FabricTable)
    scheduling: SchedulingTable = Field(default_factory=SchedulingTable)
    prefix_cache: PrefixCacheTable = Field(default_factory=PrefixCacheTable)
    transport: TransportTable = Field(default_factory=TransportTable)
    cost: CostTable = Field(default_factory=CostTable)
    deployments: Annotated[dict[str, DeploymentTable], Field(min_length=1, max_length=16)]
    testbed: TestbedTable = Field(default_factory=TestbedTable)
    gateway: GatewayTable = Field(default_factory=GatewayTable)


def read_scenario_file(path: Path, overrides: Sequence[str]) -> ScenarioFile:
    """The file with ``KEY=VALUE`` overrides laid over it, validated.

    Raises ScenarioError for a missing file, a TOML error (with its line), an unknown key, a wrong
    unit or a value out of bounds; a key that came from an override is said to.
    """
    text = read_text_file(path, "scenario file")
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"The scenario file {path} is not TOML: {error}.") from error
    except (RecursionError, ValueError) as error:  # nested too deep; an integer of > 4300 digits
        raise ScenarioError(f"The scenario file {path} is not usable TOML: {error}.") from error
    flags = _override(document, overrides)

    def given_by(key: str) -> str:
        inside = [(f"{key}.", f"{name}.", flag) for name, flag in flags.items() if key]
        found = [flag for k, name, flag in inside if k.startswith(name) or name.startswith(k)]
        return f" (given by --set {found[-1]})" if found else ""

    try:
        return ScenarioFile.model_validate(document)
    except ValidationError as error:
        where = f"the scenario file {path}"
        raise ScenarioError(explain(error, ScenarioFile, where, given_by)) from error


def _override(document: dict[str, Any], overrides: Sequence[str]) -> dict[str, str]:
    """Lay ``overrides`` over ``document``; returns each flag as given by its dotted key.

    ``link.profile`` and ``link.file`` replace the scenario's whole link, whose keys would else win
    over theirs.
    """
    if len(overrides) > MAX_OVERRIDES:
        raise ScenarioError(f"At most {MAX_OVERRIDES} --set flags are read, not {len(overrides)}.")
    whole = ("link.profile", "link.file")
    if any(flag.partition("=")[0].strip() in whole for flag in overrides):
        document["link"] = {}
    flags: dict[str, str] = {}
    for flag in overrides:
        key, separator, value = flag.partition("=")
        steps = [step.strip() for step in key.split(".")]
        if not separator or not all(steps):
            raise ScenarioError(
                f"--set {printable(flag)!r} is not KEY=VALUE with a dotted key, for example "
                "--set workload.cv=2."
            )
        table = document
        for depth, step in enumerate(steps[:-1], start=1):
            inner = table.setdefault(step, {})
            if not isinstance(inner, dict):
                raise ScenarioError(
                    f"--set {printable(flag)}: {printable('.'.join(steps[:depth]))!r} is a value, "
                    f"not a table, so it holds no key {printable(steps[depth])!r}."
                )
            table = inner
        table[steps[-1]] = _value(value)
        flags[".".join(steps)] = printable(flag)
    return flags


def _value(text: str) -> Any:  # Any: whatever TOML can hold
    """``text`` as a TOML value, else as the string it is."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (RecursionError, ValueError):  # TOMLDecodeError is a ValueError
        return text.strip()
    return parsed["value"] if len(parsed) == 1 else text.strip()
