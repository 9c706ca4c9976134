"""How the operator reaches this machine: its default routes and its SSH sessions.

Shaping an interface must not touch either. A default route is one of the main table (or what the
kernel would choose for an address of the outside), with every interface it runs over: a bond's
members and a VLAN's parent carry it too. An SSH session is an established TCP connection of a
port on which an ``sshd`` listens or of port 22, or one named by SSH_CONNECTION in the environment
of this process or of one it runs under (``sudo`` drops it from its own).
"""

import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from netem.rtnetlink import (
    RTM_GETADDR,
    RTM_GETLINK,
    RTM_GETROUTE,
    Rtnetlink,
    attribute,
    attributes,
)

Address: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network

_RTMSG = struct.Struct("=BBBBBBBBI")
_IFADDRMSG = struct.Struct("=BBBBI")
IFINFOMSG = struct.Struct("=BxHiII")
_RTNEXTHOP = struct.Struct("=HBBi")
_RTA_DST, _RTA_OIF, _RTA_MULTIPATH, _RTA_TABLE = 1, 4, 9, 15
_RT_TABLES = {253, 254}  # default, main
_UNICAST = 1
_IFLA_IFNAME, _IFLA_LINK, _IFLA_MASTER, _IFLA_LINK_NETNSID = 3, 5, 10, 37
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
#: Addresses of the outside, reserved for documentation and so nobody's in particular.
_OUTSIDE = (ipaddress.ip_address("198.51.100.1"), ipaddress.ip_address("2001:db8::1"))
_SSH_PORT = 22
_ESTABLISHED, _LISTEN = 1, 10


@dataclass(frozen=True, slots=True)
class Connection:
    """A TCP connection as /proc/net/tcp shows it to this thread."""

    local: Address
    local_port: int
    remote: Address
    remote_port: int
    state: int
    inode: int


def default_route_interfaces(route: Rtnetlink) -> dict[int, str]:
    """Indices of the interfaces that carry a default route, each with why."""
    reasons: dict[int, str] = {}
    for family in (socket.AF_INET, socket.AF_INET6):
        for body in route.dump(RTM_GETROUTE, _RTMSG.pack(family, *[0] * 8)):
            fields, found = _RTMSG.unpack_from(body), attributes(body[_RTMSG.size :])
            (table,) = struct.unpack("=I", found[_RTA_TABLE])
            if fields[1] == 0 and fields[7] == _UNICAST and table in _RT_TABLES:
                for index in _interfaces(found):
                    reasons[index] = "the default route goes by it"
    for address in _OUTSIDE:
        if (outward := interface_towards(route, address)) is not None:
            reasons.setdefault(outward, "traffic to the outside goes by it")
    return reasons | _below(route, reasons)


def interface_towards(route: Rtnetlink, address: Address) -> int | None:
    """The index of the interface by which the kernel would send; None without a route."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    header = _RTMSG.pack(family, len(address.packed) * 8, *[0] * 7)
    with suppress(OSError):
        answer = route.get(RTM_GETROUTE, header + attribute(_RTA_DST, address.packed))
        found = attributes(answer[_RTMSG.size :])
        if _RTMSG.unpack_from(answer)[7] == _UNICAST:
            return next(_interfaces(found), None)
    return None


def own_addresses(route: Rtnetlink) -> tuple[Address, ...]:
    """Every address of this network namespace."""
    addresses = []
    for body in route.dump(RTM_GETADDR, _IFADDRMSG.pack(0, 0, 0, 0, 0)):
        found = attributes(body[_IFADDRMSG.size :])
        packed = found.get(_IFA_LOCAL) or found.get(_IFA_ADDRESS)
        if packed is not None:
            addresses.append(ipaddress.ip_address(packed))
    return tuple(addresses)


def ssh_peers() -> dict[Address, str]:
    """The addresses SSH sessions of this machine come from, each with how it is known."""
    peers: dict[Address, str] = {}
    connections = tuple(_connections())
    ports = {c.local_port for c in connections if c.state == _LISTEN and _is_sshd(c)}
    for each in connections:
        if each.state == _ESTABLISHED and each.local_port in ports | {_SSH_PORT}:
            peers[each.remote] = f"an SSH session from {each.remote} to port {each.local_port}"
    for address in _environment_peers():
        peers.setdefault(address, f"the SSH session of this shell, from {address}")
    return peers


def inside(address: Address, networks: Iterable[Network]) -> Network | None:
    """The first of ``networks`` that holds the address."""
    return next((network for network in networks if address in network), None)


def _interfaces(found: dict[int, bytes]) -> Iterator[int]:
    if _RTA_OIF in found:
        yield int.from_bytes(found[_RTA_OIF], "little")
    data = found.get(_RTA_MULTIPATH, b"")
    while len(data) >= _RTNEXTHOP.size:
        length, _, _, index = _RTNEXTHOP.unpack_from(data)
        yield index
        data = data[(length + 3) & ~3 :]


def _below(route: Rtnetlink, reasons: dict[int, str]) -> dict[int, str]:
    """The interfaces that those of ``reasons`` run over: members of a bond, a VLAN's parent."""
    links = {}
    for body in route.dump(RTM_GETLINK, IFINFOMSG.pack(0, 0, 0, 0, 0)):
        links[IFINFOMSG.unpack_from(body)[2]] = attributes(body[IFINFOMSG.size :])
    found: dict[int, str] = {}
    new = list(reasons)
    while new:
        upper = new.pop()
        if upper not in links:
            continue
        name = links[upper][_IFLA_IFNAME].rstrip(b"\0").decode()
        lower = [i for i, link in links.items() if _number(link.get(_IFLA_MASTER)) == upper]
        if _IFLA_LINK_NETNSID not in links[upper]:
            lower.append(_number(links[upper].get(_IFLA_LINK)))
        for index in lower:
            if index and index != upper and index not in found and index not in reasons:
                found[index] = f"{name} runs over it, and {(reasons | found)[upper]}"
                new.append(index)
    return found


def _number(data: bytes | None) -> int:
    return 0 if data is None else int.from_bytes(data, "little")


def _connections() -> Iterator[Connection]:
    for name in ("tcp", "tcp6"):
        with suppress(FileNotFoundError):
            for line in Path(f"/proc/thread-self/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                local, remote = fields[1].split(":"), fields[2].split(":")
                yield Connection(
                    _kernel_address(local[0]),
                    int(local[1], 16),
                    _kernel_address(remote[0]),
                    int(remote[1], 16),
                    int(fields[3], 16),
                    int(fields[9]),
                )


def _kernel_address(text: str) -> Address:
    """Hex of 32-bit words in host order; an IPv4 address inside IPv6 is the IPv4 one."""
    words = [int(text[at : at + 8], 16) for at in range(0, len(text), 8)]
    address = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _is_sshd(listening: Connection) -> bool:
    wanted = f"socket:[{listening.inode}]"
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        with suppress(OSError):  # gone by now, or another user's
            if not Path(f"/proc/{pid}/comm").read_text().startswith("sshd"):
                continue
            if any(os.readlink(entry.path) == wanted for entry in os.scandir(f"/proc/{pid}/fd")):
                return True
    return False


def _environment_peers() -> Iterator[Address]:
    pid = os.getpid()
    while pid > 0:
        with suppress(OSError, ValueError):
            for setting in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, _, value = setting.partition(b"=")
                if name in (b"SSH_CONNECTION", b"SSH_CLIENT") and value:
                    yield ipaddress.ip_address(value.split()[0].decode().partition("%")[0])
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return
