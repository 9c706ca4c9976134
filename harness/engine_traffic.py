"""What a real engine adds to the KV of the geometry: copies for its ranks, one protocol for all.

    egress = p Lambda_max E[wire bytes of a long prompt]        bytes/s, wire bytes by replication

``harness.throughput`` knows the geometry alone. A plan whose engine copies is told so here: where
the copies do not fit the link, the Lambda_max of the equations is not to be had.

A decode server takes KV from its own cluster and from across. Mooncake cannot do the one by RDMA
and the other by TCP: each rank makes one TransferEngine, initialised with one protocol
(``MooncakeTransferEngine.initialize`` of SGLang 0.5.9 and 0.5.23; MC_FORCE_TCP decides for the
process). NIXL makes one UCX backend, which chooses a transport for each peer among those in
UCX_TLS: with RDMA and TCP there, and TCP alone at the prefill servers across, both are in use.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from harness.core import ScenarioError
from harness.deployment import Deployment
from harness.engine.sglang.command import gpus_of
from harness.engine_settings import EngineRole, Sglang, SglangRole
from harness.replication import Replication, Sharding, counted_bytes, faults, replicated
from harness.scenario import Scenario
from harness.throughput import DeploymentModel

Paths = Literal["one_protocol", "both_protocols"]
_BIT_PER_S = 8e-9


@dataclass(frozen=True, slots=True)
class Crossing:
    """What leaves the PrfaaS cluster of a deployment at its Lambda_max, and of one mean prompt."""

    deployment: str
    replication: Replication
    geometry_bytes_per_s: float
    wire_bytes_per_s: float
    link_bytes_per_s: float

    @property
    def fits(self) -> bool:
        return self.wire_bytes_per_s <= self.link_bytes_per_s


def sharding(role: SglangRole) -> Sharding:
    """How the servers of a role split attention; ``dp`` counts only with --enable-dp-attention,
    for without it every data-parallel rank is a whole engine of tp ranks."""
    splits = gpus_of(role.tp, role.dp, role.extra_flags) == role.tp
    return Sharding(role.tp, role.dp if splits else 1)


def crossing(scenario: Scenario, deployment: Deployment, model: DeploymentModel) -> Crossing | None:
    """None where nothing crosses, the engine is emulated, or its copies cannot be told."""
    sglang, tokens = scenario.engine.sglang, model.long_mean_tokens
    if sglang is None or tokens is None or model.egress_bytes_per_s is None:
        return None
    try:
        sides = sharding(sglang.roles["prfaas"]), sharding(sglang.roles["decode"])
        found = replicated(scenario.model.architecture, round(tokens), *sides)
    except ValueError:
        return None
    geometry = model.egress_bytes_per_s
    link = scenario.link.far_to_near.rate_bytes_per_s
    return Crossing(deployment.name, found, geometry, geometry * found.factor, link)


def crossing_note(one: Crossing) -> str | None:
    """A sentence on the copies; None where there are none."""
    if one.replication.factor == 1:
        return None
    times = ", ".join(f"{kind} {float(n):g}" for kind, n in one.replication.copies.items())
    text = (
        f"{one.deployment}: ranks at the decode side each fetch what they hold ({times} times), so "
        f"a prompt of {one.replication.tokens:,} tokens moves {one.replication.factor:.2f} times "
        f"its S_kv: at Lambda_max {_gbit(one.wire_bytes_per_s)} Gbit/s leave, not "
        f"{_gbit(one.geometry_bytes_per_s)}"
    )
    if not one.fits:
        share = one.link_bytes_per_s / one.wire_bytes_per_s
        text += (
            f", and the link has {_gbit(one.link_bytes_per_s)}: it carries {100 * share:.0f} % of "
            "the offloaded requests that the equations count on; data-parallel attention (dp, with "
            "--enable-dp-attention) makes fewer copies"
        )
    return text


def counted_kv_bytes(scenario: Scenario, tokens: int) -> int:
    """What the prefill servers' counters add for a prompt, by which a run's byte gate judges.

    Roles that prefill have one sharding where it counts: with two the smaller count is taken, which
    is a lower bound. ValueError where ranks and heads do not divide.
    """
    sglang = scenario.engine.sglang
    assert sglang is not None, "emulated engines count by request"
    decode, page = sharding(sglang.roles["decode"]), sglang.page_size or 1
    return min(
        counted_bytes(scenario.model.architecture, tokens, sharding(role), decode, page)
        for name, role in sglang.roles.items()
        if name != "decode"
    )


def paths(sglang: Sglang) -> Paths:
    """Whether a decode server of the run can take KV by RDMA inside and by TCP from across."""
    across = sglang.roles["prfaas"].env.get("UCX_TLS", "")
    tcp_alone = "tcp" in across.split(",") and not {"rc", "dc", "ud", "ib"} & {
        word.partition("_")[0] for word in across.split(",")
    }
    by_peer = sglang.transfer_backend == "nixl" and sglang.transfer_protocol == "rdma"
    return "both_protocols" if by_peer and tcp_alone else "one_protocol"


def paths_note(scenario: Scenario) -> str | None:
    """A label of the run, where decode servers take KV both from their own cluster and across."""
    sglang = scenario.engine.sglang
    mixed = [n for n, d in scenario.deployments.items() if d.num_prfaas and d.num_prefill]
    if sglang is None or not mixed:
        return None
    if paths(sglang) == "both_protocols":
        return (
            f"KV paths of {', '.join(mixed)}: RDMA inside the PD cluster and TCP from across, as "
            "NIXL's UCX chooses for each peer by UCX_TLS; look at both canaries, since UCX does "
            "not say what it chose (UCX_PROTO_INFO=y logs it)"
        )
    if sglang.transfer_protocol == "tcp":
        cost = "KV inside the PD cluster goes by TCP too, slower and with more CPU than by RDMA"
    else:
        cost = (
            "KV across goes by RDMA too, which passes by the kernel: no link shapes it, and what "
            "the run says of the link is not of its KV"
        )
    how = (
        "Mooncake has one protocol a process"
        if sglang.transfer_backend == "mooncake"
        else "both sides are given the same UCX_TLS"
    )
    return (
        f"KV paths of {', '.join(mixed)}: one protocol ({sglang.transfer_protocol}) for both, "
        f"since {how}: {cost}"
    )


def sharding_faults(scenario: Scenario) -> Iterator[tuple[str, str]]:
    """(pair of roles, why the engine has no path between them)."""
    sglang = scenario.engine.sglang
    if sglang is None:
        return
    used: dict[EngineRole, bool] = {
        "prfaas": any(one.num_prfaas for one in scenario.deployments.values()),
        "prefill": any(one.num_prefill for one in scenario.deployments.values()),
    }
    for role in (role for role, there in used.items() if there):
        pair = f"{role} to decode"
        try:
            sides = sharding(sglang.roles[role]), sharding(sglang.roles["decode"])
        except ValueError as error:
            yield pair, str(error)
            continue
        for why in faults(scenario.model.architecture, *sides, sglang.version):
            yield pair, why


def check_sharding(scenario: Scenario) -> None:
    """ScenarioError where servers of the scenario could not exchange KV."""
    for pair, why in sharding_faults(scenario):
        raise ScenarioError(
            f"'engine.tp' and 'engine.dp' in the scenario file {scenario.path} do not go together "
            f"for KV from {pair}: {why}. Give both roles the same, or sizes of which one divides "
            "the other."
        )


def traffic_notes(
    scenario: Scenario, deployments: dict[str, Deployment], models: dict[str, DeploymentModel]
) -> Iterator[str]:
    """Labels and copies, as the notes of a plan and of a run's manifest."""
    label = paths_note(scenario)
    if label is not None:
        yield label
    for name, deployment in deployments.items():
        found = crossing(scenario, deployment, models[name])
        note = None if found is None else crossing_note(found)
        if note is not None:
            yield note
    for pair, why in sharding_faults(scenario):
        yield f"engine, {pair}: {why}"


def _gbit(rate: float) -> str:
    return f"{rate * _BIT_PER_S:.1f}"
