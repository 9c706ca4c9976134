"""The figures that arXiv 2604.15039 prints in its Tables 3, 5 and 6, as records.

They are what the planner is held against. The file (``profiles/paper-tables.json``) keeps the
paper's units, Gbit/s and MiB; here they are bytes and bytes a second. A dash of the paper is None.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness.core import ScenarioError
from harness.datafile import parse_json_file

_WHAT = "published-tables file"
_MIB = 2**20
_GBIT = 1e9 / 8

Text = Annotated[str, Field(min_length=1, max_length=2000)]
Tokens = Annotated[int, Field(ge=1, le=2**31)]
Count = Annotated[int, Field(ge=1, le=100_000)]
Figure = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class PublishedPhi:
    """One cell of Table 3: Phi_kv of a model at a length; ``model`` is its architecture's name."""

    model: str
    printed_name: str
    printed_length: str
    tokens: int
    phi_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class PublishedLength:
    """One row of Table 5; ``tokens`` is the length at which the geometry meets its S_kv."""

    printed_length: str
    tokens: int
    kv_bytes: float
    prefill_s: float
    phi_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class PublishedDeployment:
    """One column of Table 6."""

    deployment: str
    threshold_tokens: int | None
    num_prfaas: int | None
    num_prefill: int | None
    num_decode: int
    ttft_mean_s: float
    ttft_p90_s: float
    theta_prfaas_req_per_s: float | None
    theta_pd_prefill_req_per_s: float | None
    theta_pd_decode_req_per_s: float
    lambda_max_req_per_s: float
    throughput_ratio: float


@dataclass(frozen=True, slots=True)
class Published:
    """All three tables, and what the text says beside Table 6."""

    source: str
    hardware: str
    gpus_per_instance: int
    engine_name: str
    engine_version: str
    phi: tuple[PublishedPhi, ...]
    lengths: tuple[PublishedLength, ...]
    deployments: tuple[PublishedDeployment, ...]
    offload_fraction: float
    long_mean_tokens: int
    egress_bytes_per_s: float
    equal_cost_gain: float

    def phi_of(self, model: str) -> tuple[PublishedPhi, ...]:
        """The cells of one model in order of length; ScenarioError when it is not in Table 3."""
        cells = tuple(cell for cell in self.phi if cell.model == model)
        if not cells:
            known = ", ".join(dict.fromkeys(cell.model for cell in self.phi))
            raise ScenarioError(f"Table 3 of {self.source} has no model {model!r}; it has {known}.")
        return cells


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Engine(_File):
    name: Text
    version: Text


class _LengthLabel(_File):
    label: Text
    tokens: Tokens


class _PhiModel(_File):
    model: Text
    printed_name: Text
    phi_gbit_per_s: list[Figure]


class _PhiTable(_File):
    hardware: Text
    gpus_per_instance: Count
    engine: _Engine
    lengths: Annotated[list[_LengthLabel], Field(min_length=1)]
    models: Annotated[list[_PhiModel], Field(min_length=1)]


class _LengthRow(_File):
    label: Text
    tokens: Tokens
    kv_mib: Figure
    prefill_s: Figure
    phi_gbit_per_s: Figure


class _DeploymentRow(_File):
    deployment: Text
    threshold_tokens: Tokens | None
    num_prfaas: Count | None
    num_prefill: Count | None
    num_decode: Count
    ttft_mean_s: Figure
    ttft_p90_s: Figure
    theta_prfaas_req_per_s: Figure | None
    theta_pd_prefill_req_per_s: Figure | None
    theta_pd_decode_req_per_s: Figure
    lambda_max_req_per_s: Figure
    throughput_ratio: Figure


class _DeploymentTable(_File):
    rows: Annotated[list[_DeploymentRow], Field(min_length=1)]
    offload_fraction: Figure
    long_mean_tokens: Tokens
    egress_gbit_per_s: Figure
    equal_cost_gain: Figure


class PublishedFile(_File):
    """The JSON form."""

    schema_version: Literal[1]
    source: Text
    notes: str = ""
    table_3: _PhiTable
    table_5: Annotated[list[_LengthRow], Field(min_length=1)]
    table_6: _DeploymentTable


def load_published(path: Path) -> Published:
    """Read the tables. ScenarioError names the file and the key that is wrong."""
    file = parse_json_file(path, _WHAT, PublishedFile)
    phi_table, case = file.table_3, file.table_6
    for row in phi_table.models:
        if len(row.phi_gbit_per_s) != len(phi_table.lengths):
            raise ScenarioError(
                f"The {_WHAT} {path} gives {len(row.phi_gbit_per_s)} figures for {row.model!r} in "
                f"'table_3' but {len(phi_table.lengths)} lengths; give one for each."
            )
    return Published(
        source=file.source,
        hardware=phi_table.hardware,
        gpus_per_instance=phi_table.gpus_per_instance,
        engine_name=phi_table.engine.name,
        engine_version=phi_table.engine.version,
        phi=tuple(
            PublishedPhi(row.model, row.printed_name, at.label, at.tokens, phi * _GBIT)
            for row in phi_table.models
            for at, phi in zip(phi_table.lengths, row.phi_gbit_per_s, strict=True)
        ),
        lengths=tuple(
            PublishedLength(
                row.label, row.tokens, row.kv_mib * _MIB, row.prefill_s, row.phi_gbit_per_s * _GBIT
            )
            for row in file.table_5
        ),
        deployments=tuple(PublishedDeployment(**row.model_dump()) for row in case.rows),
        offload_fraction=case.offload_fraction,
        long_mean_tokens=case.long_mean_tokens,
        egress_bytes_per_s=case.egress_gbit_per_s * _GBIT,
        equal_cost_gain=case.equal_cost_gain,
    )
