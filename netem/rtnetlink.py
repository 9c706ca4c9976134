"""Raw rtnetlink: requests, dumps and route look-ups as bytes.

pyroute2 decodes what it knows and so cannot give a foreign qdisc back unchanged; what must be
saved and set again, or must run in a process that imports as little as possible, goes through
here. Linux include/uapi/linux/netlink.h and rtnetlink.h: a header (length u32, type u16, flags u16,
sequence u32, port u32), a fixed body by type, then attributes (length u16, type u16, data padded
to 4 bytes).
"""

import os
import socket
import struct
import threading
from collections.abc import Iterator
from types import TracebackType

RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK = 16, 17, 18
RTM_GETADDR, RTM_GETROUTE = 22, 26
RTM_NEWQDISC, RTM_DELQDISC, RTM_GETQDISC = 36, 37, 38
RTM_NEWTCLASS, RTM_GETTCLASS = 40, 42
RTM_NEWTFILTER, RTM_DELTFILTER, RTM_GETTFILTER = 44, 45, 46
CREATE, EXCLUSIVE = 0x400, 0x200

TCA_KIND, TCA_OPTIONS = 1, 2
TC_H_ROOT, TC_H_INGRESS, TC_H_CLSACT = 0xFFFFFFFF, 0xFFFFFFF1, 0xFFFF0000
#: The two hooks of a clsact qdisc, as parents of filters.
CLSACT_INGRESS, CLSACT_EGRESS = 0xFFFFFFF2, 0xFFFFFFF3

_REQUEST, _ACK, _DUMP = 0x1, 0x4, 0x300
_ERROR, _DONE = 2, 3
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_TCMSG = struct.Struct("=BxxxiIII")
_SOL_NETLINK, _NETLINK_EXT_ACK = 270, 11
_CAPPED, _EXT_ACK_TLVS, _TYPE_MASK = 0x100, 0x200, 0x3FFF
_ERROR_MESSAGE = 1
_MAX_ANSWER_BYTES, _TIMEOUT_S = 1 << 20, 10.0


class Rtnetlink:
    """A socket of the network namespace it is made in, for any thread; a context manager."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)
        self._socket.settimeout(_TIMEOUT_S)
        self._socket.setsockopt(_SOL_NETLINK, _NETLINK_EXT_ACK, 1)
        self._sequence = 0
        self._lock = threading.Lock()

    def __enter__(self) -> "Rtnetlink":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.close()

    def request(self, kind: int, body: bytes, flags: int = 0) -> None:
        """Ask for a change; OSError with the kernel's own words when it refuses."""
        with self._lock:
            list(self._ask(kind, body, _REQUEST | _ACK | flags))

    def dump(self, kind: int, body: bytes) -> list[bytes]:
        """The bodies of all objects of a kind."""
        with self._lock:
            return list(self._ask(kind, body, _REQUEST | _DUMP))

    def qdiscs(self, index: int) -> list[bytes]:
        """Those of one interface; the kernel tells those of all whatever is asked for."""
        found = self.dump(RTM_GETQDISC, tc_message(index))
        return [body for body in found if tc_fields(body)[0] == index]

    def get(self, kind: int, body: bytes) -> bytes:
        """The body of one object, such as the route to an address."""
        with self._lock:
            (answer,) = self._ask(kind, body, _REQUEST | _ACK)
        return answer

    def _ask(self, kind: int, body: bytes, flags: int) -> Iterator[bytes]:
        self._sequence += 1
        header = _HEADER.pack(_HEADER.size + len(body), kind, flags, self._sequence, 0)
        self._socket.send(header + body)
        while True:
            data = self._socket.recv(_MAX_ANSWER_BYTES)
            while data:
                length, answer, answer_flags, sequence, _ = _HEADER.unpack_from(data)
                content, data = data[_HEADER.size : length], data[(length + 3) & ~3 :]
                if sequence != self._sequence:
                    continue  # of an earlier request that timed out
                if answer == _DONE:
                    return
                if answer == _ERROR:
                    _raise_error(content, answer_flags)
                    return
                yield content


def _raise_error(content: bytes, flags: int) -> None:
    (number,) = struct.unpack_from("=i", content)
    if number == 0:
        return
    said = os.strerror(-number)
    if flags & _EXT_ACK_TLVS:
        quoted = _HEADER.size
        if not flags & _CAPPED:
            quoted = (_HEADER.unpack_from(content, 4)[0] + 3) & ~3
        if message := attributes(content[4 + quoted :]).get(_ERROR_MESSAGE):
            said = f"{message.rstrip(bytes(1)).decode(errors='replace')} ({said})"
    raise OSError(-number, said)


def attribute(kind: int, data: bytes) -> bytes:
    """One attribute, padded."""
    return _ATTRIBUTE.pack(_ATTRIBUTE.size + len(data), kind) + data + bytes(-len(data) % 4)


def text_attribute(kind: int, text: str) -> bytes:
    return attribute(kind, text.encode() + bytes(1))


def u32_attribute(kind: int, value: int) -> bytes:
    return attribute(kind, struct.pack("=I", value))


def attributes(data: bytes) -> dict[int, bytes]:
    """Attributes by type; the flags of nested and network-order ones are taken off."""
    found: dict[int, bytes] = {}
    while len(data) >= _ATTRIBUTE.size:
        length, kind = _ATTRIBUTE.unpack_from(data)
        if length < _ATTRIBUTE.size:
            break
        found[kind & _TYPE_MASK] = data[_ATTRIBUTE.size : length]
        data = data[(length + 3) & ~3 :]
    return found


def tc_message(index: int, handle: int = 0, parent: int = 0, info: int = 0) -> bytes:
    """struct tcmsg."""
    return _TCMSG.pack(socket.AF_UNSPEC, index, handle, parent, info)


def tc_fields(body: bytes) -> tuple[int, int, int, int]:
    """(interface index, handle, parent, info) of a struct tcmsg."""
    _, index, handle, parent, info = _TCMSG.unpack_from(body)
    return index, handle, parent, info


def tc_attributes(body: bytes) -> dict[int, bytes]:
    return attributes(body[_TCMSG.size :])


def tc_kind(body: bytes) -> str:
    """Which qdisc, class or filter a message is about."""
    return tc_attributes(body).get(TCA_KIND, b"").rstrip(bytes(1)).decode()
