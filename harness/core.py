"""Words every room shares: requests, instances, routes, TTFT phases and the error tree.

Times are scenario seconds from the start of the run unless a name ends in ``_mono_ns``
(CLOCK_MONOTONIC of the host, wall time). ``time_scale`` divides scenario durations to give wall
durations; ``byte_scale`` divides KV bytes to give bytes on the wire.
"""

from dataclasses import dataclass
from typing import Literal

Role = Literal["prefill", "decode"]
Outcome = Literal["completed", "failed", "unsent"]

#: The cluster that only prefills, and the local prefill/decode cluster.
PRFAAS, PD = "prfaas", "pd"

#: The terms of the TTFT budget in the order in which a request meets them (law 7 of the design).
#: Each is a duration measured inside one process; the residual is what they leave unexplained.
BUDGET_TERMS = (
    "send_lag",
    "gateway",
    "prefill_queue",
    "prefill",
    "transfer",
    "decode_admission",
    "first_token",
    "return",
)


@dataclass(frozen=True, slots=True)
class Request:
    """One planned request. ``cached_tokens`` is the planned prefix hit, 0 for salted prompts."""

    rid: str
    index: int
    planned_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Instance:
    """One engine instance: the GPUs that serve a request together."""

    name: str
    cluster: str
    role: Role
    hardware: str


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request is prefilled and decoded; ``crosses`` is true when KV leaves its cluster."""

    prefill: Instance
    decode: Instance

    @property
    def crosses(self) -> bool:
        return self.prefill.cluster != self.decode.cluster


class PrfaasError(Exception):
    """Root of the tree. ``exit_status`` is what the command line returns for it."""

    exit_status = 3


class ScenarioError(PrfaasError):
    """The user's file, flag or value is wrong; the message names it and what would be right."""

    exit_status = 2


class LinkError(PrfaasError):
    """The inter-cluster link could not be built, or is not what was asked for."""


class EngineError(PrfaasError):
    """A worker did not start, died, or answered outside its protocol."""


class TransportError(PrfaasError):
    """KV bytes did not arrive, arrived wrong, or came from an unauthenticated peer."""


class LoadError(PrfaasError):
    """The load generator could not keep its schedule or died."""
