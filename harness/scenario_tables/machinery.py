"""What carries a run: scale, link, fabric, transport, gateway and testbed."""

from typing import Annotated, Literal

from pydantic import Field

from harness.scenario_tables.table import Table
from harness.scenario_values import (
    BodySize,
    ChunkSize,
    Duration,
    Loss,
    Name,
    PathText,
    PositiveDuration,
    Rate,
)


class ScaleTable(Table):
    time: Annotated[float, Field(ge=1, le=1000)] = 10.0
    """Wall seconds = scenario seconds / time."""
    bytes: Annotated[float, Field(ge=1, le=1e6)] = 1000.0
    """Wire bytes = KV bytes / bytes."""


class LinkTable(Table):
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
    sharing: Literal["auto", "layers", "fair"] = "auto"
    """How simulated transfers share it: "layers", one queue; "fair", max-min shares with the bounds
    of a connection; "auto", fair where a bound matters."""


class FabricTable(Table):
    rate: Rate = Field(default="400gbit", validate_default=True)
    """Rate of the network inside a cluster, per sending instance."""


class TransportTable(Table):
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


class TestbedTable(Table):
    stream_interval_tokens: Annotated[int, Field(ge=1, le=65536)] = 64
    """Tokens put together in one streamed chunk, after the second token."""
    link_backend: Literal["auto", "netem", "forwarder", "relay"] = "auto"
    gateway_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """0 picks a free port."""
    realtime: bool = True
    """Ask for a real-time priority for workers, gateway and load; root gets it."""
    request_timeout: PositiveDuration = Field(default="600s", validate_default=True)
    """In scenario time, like every duration here."""
    self_test: bool = True
    """Before the run try the load against a server of known truth, and refuse to run where it
    cannot keep its schedule."""


class GatewayTable(Table):
    """Limits of the live gateway, in scenario time unless they say otherwise. A simulation has
    max_retries of them; a phase without a limit may last as long as testbed.request_timeout."""

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
