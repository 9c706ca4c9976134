"""What serves: the emulated engine, the reference engine, or real SGLang servers that are launched
or attached to."""

from typing import Annotated, Literal

from pydantic import Field

from harness.scenario_tables.table import Table
from harness.scenario_values import Name, PathText, PositiveDuration, Tokens

Parallel = Annotated[int, Field(ge=1, le=1024)]
Gpu = Annotated[int, Field(ge=0, le=1023)]
Flags = Annotated[list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(max_length=256)]
Environment = Annotated[
    dict[
        Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")],
        Annotated[str, Field(max_length=4096, pattern=r"^[^\x00]*$")],
    ],
    Field(max_length=256),
]
#: What a scenario may ask of an engine; docs/sglang-launch.md says what each means.
Requirement = Literal["pd", "hybrid_state", "sliding_window", "kv_metrics"]


class EngineRoleTable(Table):
    """What the servers of one role have in place of [engine]'s."""

    tp: Parallel | None = None
    dp: Parallel | None = None
    ep: Parallel | None = None
    base_gpu: Gpu | None = None
    """First GPU of the first instance of this role; without it they follow those before."""
    ib_device: Name | None = None
    extra_flags: Flags = Field(default_factory=list)
    """Flags after those of [engine].extra_flags."""
    env: Environment = Field(default_factory=dict)
    """Laid over [engine].env."""


class AttachTable(Table):
    """A server that runs already: it is driven and measured, neither started nor stopped."""

    url: Annotated[str, Field(pattern=r"^http://[^/@?#\s]+/?$", max_length=300)]
    """http://HOST:PORT, as the gateway reaches it."""
    bootstrap: Annotated[str, Field(pattern=r"^[^/@?#\s]+:[0-9]{1,5}$", max_length=300)] | None = (
        None
    )
    """HOST:PORT of a prefill server's bootstrap server, as the decode servers reach it."""


class EngineTable(Table):
    """Emulated unless ``kind`` says otherwise; the emulated engine has no other key."""

    kind: Literal["emulated", "reference", "sglang"] = "emulated"
    compute: PathText | None = None
    """Reference: the model file that completes the architecture, relative to the scenario file."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 1
    """Reference: of the random weights, the same for every instance."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Reference: of weights and activations; KV has model.kv_dtype."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Reference: of one computation on the processor."""
    prefill_slots: Annotated[int, Field(ge=1, le=1024)] = 4
    """Reference: prompts whose KV a prefill instance holds until it has arrived."""
    model_path: PathText | None = None
    """Folder of the model's weights and config.json, relative to the scenario file."""
    python: PathText | None = None
    """Interpreter that has sglang, relative to the scenario file if it has a slash; the one that
    runs the harness unless given."""
    version: Annotated[str, Field(pattern=r"^[0-9][0-9A-Za-z.+]{0,63}$")] | None = None
    """The exact version of sglang that has to be there."""
    requires: Annotated[list[Requirement], Field(max_length=16)] = Field(default_factory=list)
    """What version and model must support; the scenario is refused where they do not."""
    device: Literal["cuda", "cpu"] = "cuda"
    tp: Parallel = 1
    dp: Parallel = 1
    ep: Parallel = 1
    ib_device: Name | None = None
    """RDMA device, as mlx5_0, for transfer_protocol = "rdma"; the engine picks one otherwise."""
    transfer_backend: Literal["mooncake", "nixl"] = "mooncake"
    transfer_protocol: Literal["tcp", "rdma"] = "tcp"
    page_size: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Tokens of a page of KV; the engine's own default unless given."""
    chunked_prefill_tokens: Tokens | None = None
    """Most tokens of a prefill chunk, after each of which KV is sent; else the engine's default."""
    load_format: Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")] = "auto"
    """As --load-format; "dummy" needs no weights and gives every server the same."""
    mem_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the device's memory for weights and KV pool; else the engine's default."""
    max_total_tokens: Tokens | None = None
    """Tokens of the KV pool; as many as fit unless given."""
    context_tokens: Tokens | None = None
    """Longest request, prompt and output; the model's limit unless given."""
    max_running_requests: Annotated[int, Field(ge=1, le=100_000)] | None = None
    extra_flags: Flags = Field(default_factory=list)
    """Further flags of sglang.launch_server; none that a key above stands for."""
    env: Environment = Field(default_factory=dict)
    """Environment variables of the servers."""
    ready_timeout: PositiveDuration = Field(default="600s", validate_default=True)
    """Most wall time from the launch of the servers until all are ready."""
    prefill: EngineRoleTable = Field(default_factory=EngineRoleTable)
    """The PD cluster's prefill servers."""
    decode: EngineRoleTable = Field(default_factory=EngineRoleTable)
    """The decode servers."""
    prfaas: EngineRoleTable = Field(default_factory=EngineRoleTable)
    """The PrfaaS cluster's prefill servers."""
    attach: Annotated[dict[str, AttachTable], Field(max_length=1024)] = Field(default_factory=dict)
    """By the name of an instance (prfaas-p0, pd-p0, pd-d0, ...), servers that run already."""
