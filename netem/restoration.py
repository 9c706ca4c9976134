"""What shaping changed on an interface, and how it is undone, from a record that can be on disk.

Traffic is led away by filters, so taking those off gives it back at once, without a moment in
which anything is dropped; the rest is tidying. Every step may have been done before, or never:
``restore`` can be called again at any time, by the link itself, by the dead-man process, or by a
later command that found the record. It imports little, so that it works when not much else does.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from netem.access import IFINFOMSG
from netem.link import LinkError
from netem.rtnetlink import (
    CLSACT_EGRESS,
    CLSACT_INGRESS,
    RTM_DELLINK,
    RTM_DELQDISC,
    RTM_DELTFILTER,
    TC_H_CLSACT,
    TC_H_INGRESS,
    Rtnetlink,
    tc_fields,
    tc_message,
)
from netem.saved_qdiscs import (
    Message,
    filters_at,
    has_clsact,
    interface_index,
    put_back,
    same,
    save,
)
from netem.state import runtime_folder

HOOKS = {"egress": CLSACT_EGRESS, "ingress": CLSACT_INGRESS}


@dataclass(frozen=True, slots=True)
class NicRecord:
    """What may have been changed on one interface.

    ``filters`` are (hook, preference, protocol as in the kernel's ``info``); ``ifbs`` names of
    interfaces that were made; ``replaced`` what was taken off, as ``Message`` dumps it.
    """

    interface: str
    index: int
    network_namespace: str
    filters: tuple[tuple[str, int, int], ...]
    ifbs: tuple[str, ...]
    made_clsact: bool
    replaced: tuple[tuple[int, str], ...] = ()

    @classmethod
    def load(cls, document: dict[str, Any]) -> "NicRecord":
        """From the JSON form of its fields. LinkError when that is something else."""
        try:
            lists = {key: tuple(map(tuple, document[key])) for key in ("filters", "replaced")}
            record = cls(**document | lists | {"ifbs": tuple(document["ifbs"])})
            texts = [record.interface, record.network_namespace, *record.ifbs]
            numbers = [record.index]
            for hook, preference, protocol in record.filters:
                if hook not in HOOKS:
                    raise ValueError(f"there is no hook {hook!r}")
                numbers += [preference, protocol]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("what is to be text is not")
            if not all(isinstance(number, int) for number in numbers):
                raise TypeError("what is to be a number is not")
        except (TypeError, KeyError, ValueError) as error:
            raise LinkError(
                "the record of what was changed on an interface says nothing of use "
                f"({type(error).__name__}: {error}); look at the interface's filters (tc filter "
                "show dev INTERFACE egress) and at interfaces named prfaas-*"
            ) from error
        return record


def network_namespace() -> str:
    """Names the network namespace of this thread."""
    return os.readlink("/proc/thread-self/ns/net")


def restore(record: NicRecord) -> tuple[str, ...]:
    """Undo what the record says; returns what is not as it was, in words. Any number of times."""
    if network_namespace() != record.network_namespace:
        raise LinkError(
            f"{record.interface} was shaped in another network namespace "
            f"({record.network_namespace}); take the link down from there"
        )
    with _alone(), Rtnetlink() as route:
        problems: list[str] = []
        if interface_index(route, record.interface) == record.index:
            problems += _restore_interface(route, record)
        for name in record.ifbs:
            if (index := interface_index(route, name)) is not None:
                route.request(RTM_DELLINK, IFINFOMSG.pack(0, 0, index, 0, 0))
    return tuple(problems)


@contextmanager
def _alone() -> Iterator[None]:
    """One restoration at a time: the dead-man and a command may come to the same record.

    Not the lock of the entries: whoever holds that one may be what the dead-man gave up on.
    """
    path = runtime_folder() / "restoring"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _restore_interface(route: Rtnetlink, record: NicRecord) -> list[str]:
    index, problems = record.index, []
    for hook, preference, protocol in record.filters:
        info = preference << 16 | protocol
        # ENOENT or, without a clsact, EINVAL: not there any more.
        with suppress(OSError):
            route.request(RTM_DELTFILTER, tc_message(index, 0, HOOKS[hook], info))
        if any(tc_fields(body)[3] >> 16 == preference for body in filters_at(route, index, hook)):
            problems.append(
                f"the {hook} filter {preference} of {record.interface} cannot be removed"
            )
    if record.made_clsact and has_clsact(route, index) and not _has_filters(route, index):
        route.request(RTM_DELQDISC, tc_message(index, TC_H_CLSACT, TC_H_INGRESS))
    if record.replaced:
        saved = tuple(Message.load(kind, text) for kind, text in record.replaced)
        if told := _put_back(route, record, saved):
            problems.append(told)
    return problems


def _has_filters(route: Rtnetlink, index: int) -> bool:
    return any(filters_at(route, index, hook) for hook in HOOKS)


def _put_back(route: Rtnetlink, record: NicRecord, saved: tuple[Message, ...]) -> str | None:
    present = save(route, record.index)
    if same(saved, present):
        return None
    if present:
        return (
            f"{record.interface} has got qdiscs from someone else meanwhile, so those it had "
            "before are not put back"
        )
    try:
        put_back(route, record.index, saved)
    except OSError as error:
        return f"the qdiscs {record.interface} had before cannot be put back: {error.strerror}"
    if not same(saved, save(route, record.index)):
        return f"the qdiscs of {record.interface} came back different from what they were"
    return None
