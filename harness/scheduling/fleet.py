"""The instances by cluster, and which of them are in service."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from harness.core import EngineError, Instance, Role
from harness.scheduling.backlog import DecodeBacklog, PrefillBacklog
from harness.scheduling.order import PrefillOrder, SlotOrder
from harness.scheduling.scheduler_config import Decoding


class Cluster:
    """One cluster's instances; a PD cluster is one that was built with decode instances."""

    __slots__ = ("crossing_bytes", "decodes", "finishes", "name", "order", "prefills", "slots")

    def __init__(self, name: str, max_batch: int, *, finishes: bool) -> None:
        self.name = name
        self.finishes = finishes
        self.prefills: list[PrefillBacklog] = []
        self.decodes: list[DecodeBacklog] = []
        self.order = PrefillOrder()
        self.slots = SlotOrder(max_batch)
        #: KV that is to leave for other clusters, or to come from them, and has not landed; counted
        #: where there are several clusters of a kind.
        self.crossing_bytes = 0


class Fleet:
    """Every instance of a deployment, in the order given, and the clusters they form."""

    def __init__(
        self,
        instances: Sequence[Instance],
        max_batch: int,
        decoding: Callable[[str], Decoding] | None = None,
    ) -> None:
        """``decoding``: of a decode instance by hardware, where more is known than one batch."""
        self._decoding = decoding or (lambda _hardware: Decoding(0.0, max_batch))
        # One hardware in a cluster.
        near = {one.cluster: one.hardware for one in instances if one.role == "decode"}
        self.clusters = {
            name: Cluster(
                name,
                self._decoding(near[name]).max_batch if name in near else max_batch,
                finishes=name in near,
            )
            for name in dict.fromkeys(one.cluster for one in instances)
        }
        #: The PrfaaS clusters and the PD clusters.
        self.remote = tuple(one for one in self.clusters.values() if not one.finishes)
        self.local = tuple(one for one in self.clusters.values() if one.finishes)
        self._backlogs: dict[str, PrefillBacklog | DecodeBacklog] = {}
        for index, instance in enumerate(instances):
            assert instance.name not in self._backlogs, f"two instances named {instance.name}"
            self._place(instance, index)

    def _place(self, instance: Instance, index: int) -> None:
        cluster = self.clusters[instance.cluster]
        if instance.role == "prefill":
            prefill = PrefillBacklog(instance, index)
            self._backlogs[instance.name] = prefill
            cluster.prefills = sorted([*cluster.prefills, prefill], key=lambda one: one.index)
            cluster.order.enter(prefill)
        else:
            own = self._decoding(instance.hardware)
            decode = DecodeBacklog(instance, index, own.max_batch, own.step_s)
            self._backlogs[instance.name] = decode
            cluster.decodes = sorted([*cluster.decodes, decode], key=lambda one: one.index)
            cluster.slots.enter(decode)

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Each with the role it has now."""
        return tuple(backlog.instance for backlog in self._backlogs.values())

    def __iter__(self) -> Iterator[PrefillBacklog | DecodeBacklog]:
        return iter(self._backlogs.values())

    def named(self, name: str) -> PrefillBacklog | DecodeBacklog:
        backlog = self._backlogs.get(name)
        if backlog is None:
            known = ", ".join(self._backlogs)
            raise EngineError(f"there is no instance {name!r} in this deployment; it has {known}")
        return backlog

    def changed(self, backlog: PrefillBacklog | DecodeBacklog) -> None:
        """After a change of whether an instance is in service."""
        cluster = self.clusters[backlog.instance.cluster]
        if isinstance(backlog, PrefillBacklog):
            cluster.order.enter(backlog)
        else:
            cluster.slots.enter(backlog)

    def spare(self, role: Role, now_s: float) -> PrefillBacklog | DecodeBacklog | None:
        """Of the PD instances that could take ``role``, the one that is soonest empty, as far as
        its cluster keeps another of its present role in service; None when there is none."""
        found: list[tuple[float, int, PrefillBacklog | DecodeBacklog]] = []
        for cluster in self.local:
            if role == "decode":
                serving = [one for one in cluster.prefills if one.in_service]
                if len(serving) > 1:
                    found += [(one.free_at_s(now_s), one.index, one) for one in serving]
            else:
                slots = [one for one in cluster.decodes if one.in_service]
                if len(slots) > 1:
                    found += [(float(len(one)), one.index, one) for one in slots]
        return min(found, key=lambda one: one[:2])[2] if found else None

    def has_fellow(self, backlog: PrefillBacklog | DecodeBacklog) -> bool:
        """Whether another instance of its cluster and role is in service."""
        cluster = self.clusters[backlog.instance.cluster]
        fellows: Sequence[PrefillBacklog | DecodeBacklog] = cluster.decodes
        if isinstance(backlog, PrefillBacklog):
            fellows = cluster.prefills
        return any(one.in_service for one in fellows if one is not backlog)

    def convert(self, backlog: PrefillBacklog | DecodeBacklog, role: Role) -> None:
        """Put an empty instance in service with another role."""
        assert backlog.is_empty, f"{backlog.instance.name} still has requests"
        cluster = self.clusters[backlog.instance.cluster]
        if isinstance(backlog, PrefillBacklog):
            backlog.up = False
            cluster.prefills.remove(backlog)
            # Anew: what is left of it in the heaps would be compared with its successor.
            cluster.order = PrefillOrder()
            for one in cluster.prefills:
                one.entry = None
                cluster.order.enter(one)
        else:
            cluster.decodes.remove(backlog)
            cluster.slots = SlotOrder(backlog.max_batch)
            for decode in cluster.decodes:
                cluster.slots.enter(decode)
        self._place(replace(backlog.instance, role=role), backlog.index)

    def queue_lengths(self) -> dict[str, int]:
        """Requests assigned to each instance: waiting and running, or holding or due a slot."""
        return {name: len(backlog) for name, backlog in self._backlogs.items()}

    def waits_s(self, now_s: float) -> dict[str, float]:
        """How long a prefill that came now would wait at each prefill instance in service."""
        return {
            one.instance.name: one.free_at_s(now_s) - now_s
            for cluster in self.clusters.values()
            for one in cluster.prefills
            if one.in_service
        }

    def slots_s(self, landed_s: float) -> dict[str, float]:
        """When each decode instance in service would grant a slot to KV that lands then."""
        return {
            one.instance.name: one.slot_at_s(landed_s)
            for cluster in self.clusters.values()
            for one in cluster.decodes
            if one.in_service
        }
