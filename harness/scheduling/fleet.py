"""The instances by cluster, which of them are in service, and who is free first.

``PrefillOrder`` finds the prefill instance of a cluster that is free first, in O(log n): a heap of
instants, each a lower bound of what it stands for. An instance that becomes free earlier is entered
again; one that becomes free later, by more work or a prefill that outlasts its estimate, is found
out at the top of the heap and put back. Idle instances are free now, whenever that is, and have a
heap of their own. Ties, which are the rule where instances idle, go to the one that got its last
request longest ago, then to the lowest index: each sends its KV over a path of its own, and always
the first of the idle ones would fill one path while the others are empty.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace

from harness.core import EngineError, Instance, Role
from harness.scheduling.backlog import DecodeBacklog, PrefillBacklog

#: (free_s, last given, index, backlog); the index is unique, so that backlogs are not compared.
_Busy = tuple[float, int, int, PrefillBacklog]
_Idle = tuple[int, int, PrefillBacklog]


class PrefillOrder:
    """The prefill instances of one cluster that take requests. ``enter`` after every change."""

    def __init__(self) -> None:
        self._busy: list[_Busy] = []
        self._idle: list[_Idle] = []
        self._entered: dict[int, _Busy | _Idle] = {}

    def __len__(self) -> int:
        return len(self._entered)

    def enter(self, backlog: PrefillBacklog) -> None:
        """Note that the backlog changed; it leaves while it takes no requests."""
        index = backlog.index
        if not backlog.up or backlog.draining:
            self._entered.pop(index, None)
            return
        given = backlog.last_given
        if backlog.is_idle:
            idle = (given, index, backlog)
            if self._entered.get(index) == idle:
                return
            heapq.heappush(self._idle, idle)
            self._entered[index] = idle
            return
        busy = (backlog.free_at_s(float("-inf")), given, index, backlog)
        known = self._entered.get(index)
        if known is None or len(known) == 3 or busy[:2] < known[:2]:
            heapq.heappush(self._busy, busy)
            self._entered[index] = busy
            if len(self._busy) > 64 + 4 * len(self._entered):
                # Entries that were overtaken; each costs as much work as brought it here.
                self._busy = [one for one in self._entered.values() if len(one) == 4]
                heapq.heapify(self._busy)

    def least(self, now_s: float) -> PrefillBacklog | None:
        """The instance that is free first, or None when none takes requests."""
        entered, busy, waiting = self._entered, self._busy, self._idle
        while waiting and entered.get(waiting[0][1]) is not waiting[0]:
            heapq.heappop(waiting)
        idle = waiting[0] if waiting else None
        while busy:
            top = busy[0]
            if idle is not None and top[0] > now_s:
                break
            free_s, given, index, backlog = top
            if entered.get(index) is not top:
                heapq.heappop(busy)
                continue
            now_free_s, now_given = backlog.free_at_s(now_s), backlog.last_given
            if now_free_s == free_s and now_given == given:
                return backlog if idle is None or top[:3] < (now_s, *idle[:2]) else idle[2]
            again = (now_free_s, now_given, index, backlog)
            entered[index] = again
            heapq.heapreplace(busy, again)
        return None if idle is None else idle[2]


class Cluster:
    """One cluster's instances; a PD cluster is one that was built with decode instances."""

    __slots__ = ("decodes", "finishes", "name", "order", "prefills")

    def __init__(self, name: str, *, finishes: bool) -> None:
        self.name = name
        self.finishes = finishes
        self.prefills: list[PrefillBacklog] = []
        self.decodes: list[DecodeBacklog] = []
        self.order = PrefillOrder()


class Fleet:
    """Every instance of a deployment, in the order given, and the clusters they form."""

    def __init__(self, instances: Sequence[Instance], max_batch: int) -> None:
        self._max_batch = max_batch
        near = {one.cluster for one in instances if one.role == "decode"}
        self.clusters = {
            name: Cluster(name, finishes=name in near)
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
            decode = DecodeBacklog(instance, index, self._max_batch)
            self._backlogs[instance.name] = decode
            cluster.decodes = sorted([*cluster.decodes, decode], key=lambda one: one.index)

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
        """After every change of a backlog's work or service. A late word of a request from before
        a change of role concerns nobody who serves now."""
        current = self._backlogs[backlog.instance.name] is backlog
        if current and isinstance(backlog, PrefillBacklog):
            self.clusters[backlog.instance.cluster].order.enter(backlog)

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
                cluster.order.enter(one)
        else:
            cluster.decodes.remove(backlog)
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
