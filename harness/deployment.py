"""A deployment: how many instances of which hardware serve, in which cluster and role.

``num_prfaas`` instances prefill in the PrfaaS cluster; ``num_prefill`` and ``num_decode`` share
the PD cluster. No PrfaaS instance is the homogeneous baseline; no local prefill instance is the
naive heterogeneous one (N_prfaas / N_p / N_d of Table 6, arXiv 2604.15039).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from harness.core import PD, PRFAAS, Instance

#: How requests are divided where both clusters prefill: by length, or by least expected completion.
Balancing = Literal["threshold", "capacity"]


def cluster_names(kind: str, count: int) -> tuple[str, ...]:
    """Of ``count`` clusters of a kind: the first one has the kind's name, then they are numbered
    from 2 on."""
    return tuple(kind if number == 1 else f"{kind}-{number}" for number in range(1, count + 1))


@dataclass(frozen=True, slots=True)
class PrfaasCluster:
    """A cluster that only prefills, and the rate at which KV leaves it."""

    hardware: str
    num_instances: int
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class PdCluster:
    """A cluster that prefills and decodes, and the rate at which KV comes in from outside."""

    hardware: str
    num_prefill: int
    num_decode: int
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Deployment:
    """``threshold_tokens`` (t) is None unless both clusters can prefill, or could: a search that
    leaves no local prefill gives threshold 0, which sends everything to PrfaaS. ``balancing`` by
    capacity has none either.

    Further clusters, each with a link of its own, are planned and simulated but not run live.
    """

    name: str
    threshold_tokens: int | None
    num_prfaas: int
    num_prefill: int
    num_decode: int
    prfaas_hardware: str | None
    pd_hardware: str
    more_prfaas: tuple[PrfaasCluster, ...] = ()
    more_pd: tuple[PdCluster, ...] = ()
    balancing: Balancing = "threshold"

    def prfaas_clusters(self, link_bytes_per_s: float) -> tuple[PrfaasCluster, ...]:
        """Every PrfaaS cluster; the scenario's link is the first one's."""
        if self.prfaas_hardware is None or not self.num_prfaas:
            return ()
        first = PrfaasCluster(self.prfaas_hardware, self.num_prfaas, link_bytes_per_s)
        return (first, *self.more_prfaas)

    def pd_clusters(self, link_bytes_per_s: float) -> tuple[PdCluster, ...]:
        """Every PD cluster; the scenario's link is the first one's."""
        first = PdCluster(self.pd_hardware, self.num_prefill, self.num_decode, link_bytes_per_s)
        return (first, *self.more_pd)

    def egress_bytes_per_s(self, link_bytes_per_s: float) -> Mapping[str, float]:
        """What may leave each PrfaaS cluster, by its name."""
        clusters = self.prfaas_clusters(link_bytes_per_s)
        rates = [one.link_bytes_per_s for one in clusters]
        return dict(zip(cluster_names(PRFAAS, len(clusters)), rates, strict=True))

    def ingress_bytes_per_s(self, link_bytes_per_s: float) -> Mapping[str, float]:
        """What may enter each PD cluster from outside, by its name; empty for one cluster of each
        kind, where that is what leaves the other."""
        clusters = self.pd_clusters(link_bytes_per_s)
        if not self.more_prfaas and not self.more_pd:
            return {}
        rates = [one.link_bytes_per_s for one in clusters]
        return dict(zip(cluster_names(PD, len(clusters)), rates, strict=True))

    def instances(self) -> tuple[Instance, ...]:
        """Every instance: those of the PrfaaS clusters, then of each PD cluster prefill, decode."""
        remote, local = self.prfaas_clusters(0.0), self.pd_clusters(0.0)
        found: list[Instance] = []
        for name, far in zip(cluster_names(PRFAAS, len(remote)), remote, strict=True):
            found += (
                Instance(f"{name}-p{i}", name, "prefill", far.hardware)
                for i in range(far.num_instances)
            )
        for name, near in zip(cluster_names(PD, len(local)), local, strict=True):
            found += (
                Instance(f"{name}-p{i}", name, "prefill", near.hardware)
                for i in range(near.num_prefill)
            )
            found += (
                Instance(f"{name}-d{i}", name, "decode", near.hardware)
                for i in range(near.num_decode)
            )
        return tuple(found)

    def fault(self) -> tuple[str, str] | None:
        """The key that makes this deployment meaningless and why, or None."""
        if self.num_decode < 1:
            return "num_decode", "a deployment needs at least one decode instance"
        if self.num_prfaas + self.num_prefill < 1:
            return "num_prefill", (
                "nothing would prefill; give num_prfaas or num_prefill at least one instance"
            )
        if self.num_prfaas and self.prfaas_hardware is None:
            return "prfaas_hardware", "it is missing, though num_prfaas asks for instances of it"
        if self.balancing == "capacity" and (fault := self._capacity_fault()):
            return fault
        if self.threshold_tokens is not None and not self.num_prfaas:
            return "threshold_tokens", (
                "a threshold needs a PrfaaS cluster to offload to, but num_prfaas is 0; remove the "
                "threshold or add PrfaaS instances"
            )
        if self.threshold_tokens and not self.num_prefill:
            return "threshold_tokens", (
                "without local prefill (num_prefill is 0) every prompt goes to PrfaaS, so a "
                "threshold has no effect; remove it or add local prefill instances"
            )
        if self.more_prfaas and not self.num_prfaas:
            return "more_prfaas", "the first PrfaaS cluster (num_prfaas) has no instance"
        if any((one.num_prefill > 0) != (self.num_prefill > 0) for one in self.more_pd):
            return "more_pd", "either every PD cluster prefills or none does"
        by_length = self.balancing == "threshold" and self.threshold_tokens is None
        if by_length and self.num_prfaas and self.num_prefill:
            return "threshold_tokens", (
                "it is missing, though both clusters prefill; it says which prompts PrfaaS gets, "
                "for example threshold_tokens = 19400"
            )
        return None

    def _capacity_fault(self) -> tuple[str, str] | None:
        if not (self.num_prfaas and self.num_prefill):
            return "balancing", (
                "by capacity requests are divided between two clusters that prefill; give "
                "num_prfaas and num_prefill at least one instance each, or remove it"
            )
        if self.threshold_tokens is not None:
            return "threshold_tokens", (
                "balancing by capacity looks at no length, so a threshold has no effect; remove "
                "one of the two"
            )
        return None
