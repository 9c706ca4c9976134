"""The qdiscs that somebody else put on an interface: seen, saved, taken off, put back.

What the kernel sets up by itself has the handle 0 and comes back by itself; the rest has a handle.
Qdiscs that only queue (``QUEUEING``) do not shape and can stay under a link. Anything else would
add to the link, so it is either refused or, on request, taken off while the link is up.

Saved are the kernel's own messages, so no kind has to be understood. Whether they can be put back
is not assumed: ``rehearse`` does it on a scratch interface first and compares. Counters and the
like, which cannot be the same, are left out of the comparison; a kind that has others fails it.
"""

import base64
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from netem.access import IFINFOMSG
from netem.link import LinkError
from netem.rtnetlink import (
    CLSACT_EGRESS,
    CLSACT_INGRESS,
    CREATE,
    EXCLUSIVE,
    RTM_DELLINK,
    RTM_DELQDISC,
    RTM_GETLINK,
    RTM_GETTCLASS,
    RTM_GETTFILTER,
    RTM_NEWLINK,
    RTM_NEWQDISC,
    RTM_NEWTCLASS,
    RTM_NEWTFILTER,
    TC_H_CLSACT,
    TC_H_INGRESS,
    TC_H_ROOT,
    TCA_KIND,
    TCA_OPTIONS,
    Rtnetlink,
    attribute,
    attributes,
    tc_attributes,
    tc_fields,
    tc_kind,
    tc_message,
    text_attribute,
    u32_attribute,
)

QUEUEING = frozenset({"noqueue", "mq", "pfifo_fast", "pfifo", "bfifo", "fq", "fq_codel", "sfq"})
#: Kinds whose classes are made by a user; those of the others come with the qdisc.
_CLASSFUL = {"htb", "hfsc", "drr", "qfq"}
_MAJOR, _NODE = 0xFFFF0000, 0xFFF
_HTB_INIT, _U32_FLAGS = 2, 11
#: What a user may say about hardware offload; the kernel answers with where the filter is besides.
_SETTABLE_FLAGS = 0b10011
#: Counters in the options: by kind, the attribute and where its counter (u32) lies; None is all.
_VOLATILE: dict[str, dict[int, int | None]] = {"htb": {2: 16}, "u32": {7: None, 9: None}}
_IFLA_IFNAME, _IFLA_LINKINFO, _IFLA_INFO_KIND = 3, 18, 1
_IFLA_NUM_TX_QUEUES, _IFLA_NUM_RX_QUEUES = 31, 32


@dataclass(frozen=True, slots=True)
class Message:
    """One object of the tree: its netlink type and its body, for whatever interface."""

    kind: int
    body: bytes

    def dump(self) -> tuple[int, str]:
        return self.kind, base64.b64encode(self.body).decode()

    @classmethod
    def load(cls, kind: int, text: str) -> "Message":
        return cls(kind, base64.b64decode(text))

    def of_interface(self, index: int) -> bytes:
        """The body as a request: what identifies it, its kind and its options."""
        _, handle, parent, info = tc_fields(self.body)
        if self.kind != RTM_NEWTFILTER:
            info = 0  # a reference count
        found = tc_attributes(self.body)
        options = found.get(TCA_OPTIONS)
        if options is not None:
            options = _settable(tc_kind(self.body), self.kind, options)
        kept = [attribute(TCA_KIND, found[TCA_KIND])]
        kept += [] if options is None else [attribute(TCA_OPTIONS, options)]
        return tc_message(index, handle, parent, info) + b"".join(kept)

    def compared(self) -> bytes:
        """What must be the same after putting it back."""
        kind = tc_kind(self.body)
        request = self.of_interface(0)
        options = attributes(tc_attributes(request).get(TCA_OPTIONS, b""))
        for number, counter_at in _VOLATILE.get(kind, {}).items():
            if counter_at is None or number not in options:
                options.pop(number, None)
            else:
                data = bytearray(options[number])
                data[counter_at : counter_at + 4] = bytes(4)
                options[number] = bytes(data)
        if kind in _VOLATILE:
            return request[:20] + b"".join(attribute(*each) for each in sorted(options.items()))
        return request


def shaping(route: Rtnetlink, index: int, own_preferences: frozenset[int]) -> tuple[str, ...]:
    """What on an interface is not only a queue, in words, but for our own filters."""
    told = []
    for body in route.qdiscs(index):
        kind, (_, handle, parent, _) = tc_kind(body), tc_fields(body)
        if parent == TC_H_INGRESS:
            foreign = [
                each for each in _hook_filters(route, index, handle)
                if tc_fields(each)[3] >> 16 not in own_preferences
            ]  # fmt: skip
            if foreign or kind != "clsact":
                filters = f" with {len(foreign)} filters" if foreign else ""
                told.append(f"{kind} {handle >> 16:x}:{filters}")
        elif kind not in QUEUEING:
            told.append(f"{kind} {handle >> 16:x}:")
    return tuple(told)


def has_clsact(route: Rtnetlink, index: int) -> bool:
    return any(
        tc_kind(body) == "clsact" and tc_fields(body)[2] == TC_H_INGRESS
        for body in route.qdiscs(index)
    )


def save(route: Rtnetlink, index: int) -> tuple[Message, ...]:
    """Everything with a handle on an interface: qdiscs, their classes, their filters."""
    qdiscs = [body for body in route.qdiscs(index) if tc_fields(body)[1] != 0]
    messages = [Message(RTM_NEWQDISC, body) for body in qdiscs]
    kinds = {tc_fields(body)[1] & _MAJOR: tc_kind(body) for body in qdiscs}
    parents = [tc_fields(body)[1] for body in qdiscs]
    for body in route.dump(RTM_GETTCLASS, tc_message(index)):
        if kinds.get(tc_fields(body)[1] & _MAJOR) in _CLASSFUL:
            messages.append(Message(RTM_NEWTCLASS, body))
            parents.append(tc_fields(body)[1])
    for parent in parents:
        found = (
            _hook_filters(route, index, parent)
            if parent & _MAJOR == TC_H_CLSACT
            else _filters(route, index, parent)
        )
        messages += [Message(RTM_NEWTFILTER, body) for body in found]
    return tuple(messages)


def take_off(route: Rtnetlink, index: int) -> None:
    """Leave what the kernel sets up by itself."""
    for body in route.qdiscs(index):
        _, handle, parent, _ = tc_fields(body)
        if handle != 0 and parent in (TC_H_ROOT, TC_H_INGRESS):
            route.request(RTM_DELQDISC, tc_message(index, handle, parent))


def put_back(route: Rtnetlink, index: int, saved: tuple[Message, ...]) -> None:
    """Set up a saved tree, parents first. OSError when the kernel refuses a part."""
    made: set[int] = {TC_H_ROOT, TC_H_INGRESS}
    handles = {tc_fields(message.body)[1] for message in saved}
    waiting = list(saved)
    while waiting:
        ready = [message for message in waiting if _needs(message, handles) <= made]
        if not ready:
            raise OSError(0, "parts of the saved qdiscs hang on none of it")
        for message in ready:
            route.request(message.kind, message.of_interface(index), CREATE | EXCLUSIVE)
            made.add(tc_fields(message.body)[1])
        waiting = [message for message in waiting if message not in ready]


def same(saved: tuple[Message, ...], present: tuple[Message, ...]) -> bool:
    """Whether two trees are alike but for their counters."""
    return sorted(m.compared() for m in saved) == sorted(m.compared() for m in present)


def rehearse(route: Rtnetlink, saved: tuple[Message, ...], queues: int, scratch: str) -> None:
    """Put a tree on an interface made for it; LinkError when it does not come out the same."""
    try:
        with _scratch_interface(route, scratch, queues) as index:
            put_back(route, index, saved)
            came_out = same(saved, save(route, index))
    except OSError as error:
        raise LinkError(f"it could not be put back afterwards ({error.strerror})") from error
    if not came_out:
        raise LinkError("it would come back different from what it is now")


@contextmanager
def _scratch_interface(route: Rtnetlink, name: str, queues: int) -> Iterator[int]:
    make_ifb(route, name, queues)
    index = interface_index(route, name)
    assert index is not None
    try:
        yield index
    finally:
        route.request(RTM_DELLINK, IFINFOMSG.pack(0, 0, index, 0, 0))


def make_ifb(route: Rtnetlink, name: str, queues: int) -> None:
    """An ifb interface, down. LinkError when the kernel has none."""
    kind = attribute(_IFLA_LINKINFO, text_attribute(_IFLA_INFO_KIND, "ifb"))
    counts = [u32_attribute(each, queues) for each in (_IFLA_NUM_TX_QUEUES, _IFLA_NUM_RX_QUEUES)]
    body = IFINFOMSG.pack(0, 0, 0, 0, 0) + text_attribute(_IFLA_IFNAME, name) + kind
    try:
        route.request(RTM_NEWLINK, body + b"".join(counts), CREATE | EXCLUSIVE)
    except OSError as error:
        raise LinkError(
            f"the interface {name} of kind ifb cannot be made ({error.strerror}): it needs "
            "CAP_NET_ADMIN and the module ifb"
        ) from error


def interface_index(route: Rtnetlink, name: str) -> int | None:
    """None when there is no such interface."""
    with suppress(OSError):
        wanted = IFINFOMSG.pack(0, 0, 0, 0, 0) + text_attribute(_IFLA_IFNAME, name)
        return int(IFINFOMSG.unpack_from(route.get(RTM_GETLINK, wanted))[2])
    return None


def _settable(kind: str, message: int, options: bytes) -> bytes:
    """Options as the kernel takes them, where that is not as it tells them."""
    found = attributes(options)
    if kind == "htb" and message == RTM_NEWQDISC:
        # struct tc_htb_glob begins with a version: told as 0x30011, wanted as 3.
        version = int.from_bytes(found[_HTB_INIT][:4], "little") >> 16
        found[_HTB_INIT] = version.to_bytes(4, "little") + found[_HTB_INIT][4:]
    elif kind == "u32" and _U32_FLAGS in found:
        flags = int.from_bytes(found[_U32_FLAGS], "little") & _SETTABLE_FLAGS
        found[_U32_FLAGS] = flags.to_bytes(4, "little")
    else:
        return options
    return b"".join(attribute(*each) for each in found.items())


def _needs(message: Message, handles: set[int]) -> set[int]:
    """The handles that must be there before it."""
    _, handle, parent, _ = tc_fields(message.body)
    if message.kind == RTM_NEWTCLASS:
        return {handle & _MAJOR, parent}
    if parent in handles or parent in (TC_H_ROOT, TC_H_INGRESS):
        return {parent}
    # A hook of clsact or a queue of mq: it comes with the qdisc.
    return {parent & _MAJOR}


def filters_at(route: Rtnetlink, index: int, hook: str) -> list[bytes]:
    """The filters at the "ingress" or "egress" hook of a clsact qdisc."""
    return _filters(route, index, CLSACT_INGRESS if hook == "ingress" else CLSACT_EGRESS)


def _hook_filters(route: Rtnetlink, index: int, handle: int) -> list[bytes]:
    """The filters at both hooks of clsact; of the older ingress qdisc, which has one."""
    found = [each for hook in ("ingress", "egress") for each in filters_at(route, index, hook)]
    return found or _filters(route, index, handle)


def _filters(route: Rtnetlink, index: int, parent: int) -> list[bytes]:
    """Filters without what the kernel makes for them: the chain's head and u32's hash tables."""
    with suppress(OSError):  # a qdisc that takes no filters
        found = route.dump(RTM_GETTFILTER, tc_message(index, parent=parent))
        return [body for body in found if _is_filter(tc_kind(body), tc_fields(body)[1])]
    return []


def _is_filter(kind: str, handle: int) -> bool:
    return bool(handle & _NODE if kind == "u32" else handle)
