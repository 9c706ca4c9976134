"""A link on a real node: the traffic between this node and the peers' addresses, on one interface.

Nothing else is shaped, and what is dangerous is refused (``netem.nic_plan``). A dead-man process
(``netem.deadman``) is watching before anything changes and gives the interface back however the
link ends.

One node shapes both directions, or each end its own (``shape="egress"``). Where several nodes of
a cluster share a link: shape on the one node that routes for all (``router_node``: a true shared
bottleneck), or give every node its part (``per_node_share``: what one leaves unused no other can
use), or let each queue of the interface have its part (``mq``: no lock is shared, one flow gets one
queue's part). What the parts add up to is the link.

Hardware that bypasses the kernel is not shaped: RDMA (RoCE, InfiniBand), DPDK, AF_XDP.
"""

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO

from netem.deadman import DeadMan, dead_man
from netem.link import LinkError, LinkSpec
from netem.namespace import capabilities_lacking
from netem.nic_plan import Nic, NicPlan, look, refuse
from netem.nic_tree import (
    MAX_QUEUES,
    Ifb,
    add_clsact,
    build_ifb,
    change_ifb,
    ifb_counters,
    protocol_info,
    redirect,
)
from netem.restoration import NicRecord, network_namespace
from netem.rtnetlink import Rtnetlink, tc_fields
from netem.saved_qdiscs import (
    filters_at,
    has_clsact,
    rehearse,
    same,
    save,
    shaping,
    take_off,
)
from netem.site import DirectionCounters, LinkCounters, put_back_on_failure
from netem.state import Entry, entries, locked, write

#: Preferences our filters take from; lower ones come first.
_PREFERENCES = range(0xA0F0, 0xA1F0)
_NONE = DirectionCounters(0, 0, 0, 0)


@dataclass(slots=True)
class NicLink:
    """A shaped interface. ``applied`` is this node's part; ``notes`` say what it is not."""

    applied: LinkSpec
    plan: NicPlan
    nic: Nic
    notes: tuple[str, ...]
    ifbs: tuple[Ifb, ...]
    guard: DeadMan
    route: Rtnetlink
    _changes: int = field(default=0, init=False)
    _changing: threading.Lock = field(default_factory=threading.Lock, init=False)

    def counters(self) -> LinkCounters:
        """Totals of the directions shaped here since the link was opened; zeros of the other."""
        self._assert_up()
        found = {ifb.direction: ifb_counters(self.route, ifb) for ifb in self.ifbs}
        return LinkCounters(
            time.monotonic_ns(), found.get("near_to_far", _NONE), found.get("far_to_near", _NONE)
        )

    def prepare(self, spec: LinkSpec) -> None:
        """Nothing of a change takes long here."""

    def apply(self, spec: LinkSpec) -> None:
        """Shape as ``spec`` says from now on; what is held stays held."""
        self._assert_up()
        applied = self.nic.carries(self.plan.applied(spec))
        with self._changing:
            with put_back_on_failure(lambda: self._change(self.applied)):
                self._change(applied)
            self.applied = applied

    def _change(self, applied: LinkSpec) -> None:
        self._changes += 1
        for ifb in self.ifbs:
            change_ifb(self.route, ifb, applied, self._changes)

    def _assert_up(self) -> None:
        if not self.guard.is_watching:
            raise LinkError(
                f"the dead-man process of {self.plan.interface} has ended, so the interface was "
                "given back and the link is down"
            )


@contextmanager
def open_nic(
    spec: LinkSpec, plan: NicPlan, entry: Entry, log: IO[bytes] | None = None
) -> Iterator[NicLink]:
    """Shape; everything is as it was when the context ends, or this process.

    ``entry`` is the link's record (``netem.state.held``), which is told what may be changed
    before it is. LinkError for what is refused; nothing was changed then.
    """
    if "CAP_NET_ADMIN" in capabilities_lacking():
        raise LinkError(
            f"shaping the interface {plan.interface} of this node needs CAP_NET_ADMIN: run as "
            "root. Without it there are only links between sites of this machine (leave --nic out)"
        )
    with Rtnetlink() as route, tempfile.TemporaryFile() as own_log:
        nic = look(route, plan.interface)
        refuse(route, nic, plan)
        with locked():
            record, ifbs = _plan_changes(route, nic, plan, entry)
            _write_down(record, entry)
        with dead_man(record, log or own_log, plan.silence_s) as guard:
            applied = nic.carries(plan.applied(spec))
            notes = _install(route, nic, plan, record, ifbs, applied, entry)
            yield NicLink(applied, plan, nic, tuple(notes), ifbs, guard, route)


def _plan_changes(
    route: Rtnetlink, nic: Nic, plan: NicPlan, entry: Entry
) -> tuple[NicRecord, tuple[Ifb, ...]]:
    """What is going to be changed, written down before it is; the caller holds the lock."""
    siblings = _siblings(plan.interface, nic, entry)
    own = frozenset(preference for one in siblings for _, preference, _ in one.filters)
    replaced = _replaced(route, nic, plan, own, entry)
    hooks = ("egress", "ingress") if plan.shape == "both" else (plan.shape,)
    free = iter(_free_preferences(route, nic.index, own))
    queues = _queues(nic) if plan.sharing == "mq" else 1
    ifbs = tuple(
        Ifb(
            f"{_ifb_stem(entry)}{hook[0]}",
            hook,
            "near_to_far" if (hook == "egress") == (plan.site == "near") else "far_to_near",
            queues,
        )
        for hook in hooks
    )
    made_before = any(one.made_clsact for one in siblings)
    record = NicRecord(
        plan.interface,
        nic.index,
        network_namespace(),
        tuple(
            (hook, next(free), protocol_info(each)) for hook in hooks for each in _versions(plan)
        ),
        tuple(ifb.name for ifb in ifbs),
        made_clsact=made_before or bool(replaced) or not has_clsact(route, nic.index),
        replaced=replaced,
    )
    return record, ifbs


def _install(
    route: Rtnetlink, nic: Nic, plan: NicPlan, record: NicRecord, ifbs: tuple[Ifb, ...],
    applied: LinkSpec, entry: Entry,
) -> list[str]:  # fmt: skip
    """Make the changes, the one that leads traffic away last; returns notes."""
    notes = list(_notes(plan, applied, nic))
    if record.replaced:
        take_off(route, nic.index)
        notes.append(f"the qdiscs that {plan.interface} had are taken off while the link is up")
    alias = f"prfaas link {entry.name} on {plan.interface}, process {entry.owner.pid}"
    for ifb in ifbs:
        notes += build_ifb(route, ifb, applied, alias)
    if not has_clsact(route, nic.index):
        add_clsact(route, nic.index)
    for ifb in ifbs:
        of_hook = [each for each in record.filters if each[0] == ifb.hook]
        preferences = {
            version: each[1] for version, each in zip(_versions(plan), of_hook, strict=True)
        }
        redirect(route, nic.index, ifb, plan.peers, preferences)
    return list(dict.fromkeys(notes))


def _versions(plan: NicPlan) -> list[int]:
    """The IP versions of the peers: a filter's preference is for one of them."""
    return sorted({int(peer.version) for peer in plan.peers})


def _replaced(
    route: Rtnetlink, nic: Nic, plan: NicPlan, own: frozenset[int], entry: Entry
) -> tuple[tuple[int, str], ...]:
    """The qdiscs to take off, as they are put back; none where those there only queue."""
    found = shaping(route, nic.index, own)
    if not found:
        return ()
    what = ", ".join(found)
    if own:
        raise LinkError(f"{plan.interface} has other qdiscs ({what}) beside a link that is up")
    if not plan.replace:
        raise LinkError(
            f"{plan.interface} is shaped already ({what}), which would add to the link. With "
            "--replace they are taken off and put back at the end"
        )
    saved = save(route, nic.index)
    scratch = f"{_ifb_stem(entry)}t"
    trial = NicRecord(plan.interface, nic.index, network_namespace(), (), (scratch,), False)
    _write_down(trial, entry)
    try:
        rehearse(route, saved, nic.queues, scratch)
    except LinkError as error:
        raise LinkError(
            f"{plan.interface} is shaped already ({what}), and that is not replaced, because "
            f"{error}; take it off by hand"
        ) from error
    assert same(saved, save(route, nic.index)), "a rehearsal changed the interface itself"
    return tuple(message.dump() for message in saved)


def _write_down(record: NicRecord, entry: Entry) -> None:
    """On disk before it is done: what is not written down cannot be undone by another."""
    write(replace(entry, details=entry.details | {"nic": asdict(record)}))


def _ifb_stem(entry: Entry) -> str:
    """Of interface names, which have 15 characters at most."""
    return f"prfaas-{entry.link_id[:6]}"


def _siblings(interface: str, nic: Nic, entry: Entry) -> list[NicRecord]:
    """The records of other links on the same interface."""
    records = [
        NicRecord.load(each.details["nic"])
        for each in entries()
        if "nic" in each.details and each.link_id != entry.link_id and each.owner.is_alive()
    ]
    here = network_namespace()
    return [
        record
        for record in records
        if (record.interface, record.index, record.network_namespace)
        == (interface, nic.index, here)
    ]


def _free_preferences(route: Rtnetlink, index: int, own: frozenset[int]) -> list[int]:
    taken = own | {
        tc_fields(body)[3] >> 16
        for hook in ("egress", "ingress")
        for body in filters_at(route, index, hook)
    }
    return [preference for preference in _PREFERENCES if preference not in taken]


def _queues(nic: Nic) -> int:
    return min(nic.queues, MAX_QUEUES)


def _notes(plan: NicPlan, applied: LinkSpec, nic: Nic) -> Iterator[str]:
    yield from applied.warnings()
    yield (
        f"on {plan.interface} only IP packets to and from {', '.join(map(str, plan.peers))} are "
        f"shaped ({plan.shape})"
    )
    if plan.nodes > 1:
        yield (
            f"this node's share is 1/{plan.nodes} of the link: what it leaves unused, no other "
            "node can use; the sum over the nodes is the link"
        )
    if plan.sharing == "mq":
        yield (
            f"each of {_queues(nic)} queues has 1/{_queues(nic)} of the rate: one flow gets no "
            "more, and the sum over the queues is the link"
        )
    if applied.per_flow_cap_bytes_per_s is not None:
        yield (
            "per_flow_cap is not applied on an interface; cap the flows at the senders "
            "(SO_MAX_PACING_RATE), or use a router of namespaces"
        )
    yield (
        "the sender's own host shapes, so TCP small queues do not bound it: its packets wait in "
        "the link's queue"
    )
    if (Path("/sys/class/net") / plan.interface / "device/infiniband").exists():
        yield f"{plan.interface} can do RDMA, which passes by the kernel: RDMA is not shaped"
