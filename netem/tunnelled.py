"""The forwarder backend: two namespaces, a TUN device in each, the forwarder process between.

Everything a link description holds is applied, by the forwarder's own arithmetic. Where tc-netem
does otherwise: a correlation keeps the rate of a loss, or the spread of a jitter, which the kernel
narrows; a duplicate is not judged again; a corrupted bit is never in the IP header.
"""

import errno
import fcntl
import os
import secrets
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from netem.control import Helper, helper
from netem.direction_json import settings_to_json
from netem.link import DIRECTIONS, Direction, LinkError, LinkSpec
from netem.namespace import (
    Namespace,
    allow_window,
    congestion_control,
    namespace,
    set_address,
)
from netem.site import LinkCounters, Site, counters_from_answer
from netem.units import format_duration_s
from netem.way import way_settings

#: A round trip through the forwarder without any added delay, measured on two shared cores: two
#: process wake-ups. It is taken off the delay that is added.
ROUND_TRIP_FLOOR_S = 0.08e-3

_DEVICE = "link0"
_NEAR_ADDRESS, _FAR_ADDRESS, _PREFIX_LENGTH = "10.80.0.1", "10.80.0.2", 24
#: The device's own queue only bridges the forwarder's wake-up; its default of 500 drops. The first
#: that the kernel takes: some (6.1.192, not 6.1.176) answer more than 32767 with ERANGE.
_DEVICE_QUEUE_PACKETS = 50_000, 32_767, 10_000

# linux/if_tun.h
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO_ECN = 0x01, 0x02, 0x08


@dataclass
class ForwarderPath:
    applied: LinkSpec
    notes: tuple[str, ...]
    near: Site
    far: Site
    forwarder: Helper
    _changing: threading.Lock = field(default_factory=threading.Lock)

    def expose(self, site: Site, port: int) -> tuple[str, int]:
        return site.address, port

    def withdraw(self, site: Site, port: int) -> None:
        """Nothing was set up by ``expose``."""

    def prepare(self, spec: LinkSpec) -> None:
        """Nothing of a change takes long here."""

    def apply(self, spec: LinkSpec) -> None:
        """Change the running link. Without a seed in ``spec`` the random streams go on."""
        if spec.mtu_bytes != self.applied.mtu_bytes:
            raise LinkError("the mtu of a running link cannot be changed; open another link")
        if spec.seed not in (None, self.applied.seed):
            raise LinkError("the seed of a running link cannot be changed; open another link")
        applied = _attainable(replace(spec, seed=self.applied.seed))
        with self._changing:
            self.forwarder.ask({"op": "apply", **_settings(applied)})
            self.applied = applied

    def counters(self) -> LinkCounters:
        return counters_from_answer(self.forwarder.ask({"op": "counters"}))

    def oddities(self) -> dict[str, int]:
        """Frames that were ``malformed``, packets ``marked`` for congestion instead of lost."""
        answer = self.forwarder.ask({"op": "counters"})
        return {name: answer[name] for name in ("malformed", "marked")}


@contextmanager
def open_forwarder(spec: LinkSpec) -> Iterator[ForwarderPath]:
    """Namespaces, devices and the forwarder. LinkError names the capability or device lacking.

    Where ``spec`` has no seed one is drawn; ``applied`` has it.
    """
    seed = secrets.randbits(32) if spec.seed is None else spec.seed
    applied = _attainable(replace(spec, seed=seed))
    notes = []
    if applied.rtt_s > spec.rtt_s:
        notes.append(f"rtt raised to the forwarder's floor of {format_duration_s(applied.rtt_s)}")
    with ExitStack() as stack:
        near, far = (stack.enter_context(namespace()) for _ in range(2))
        ends = ((near, _NEAR_ADDRESS), (far, _FAR_ADDRESS))
        # Only the forwarder keeps the devices: with it they vanish, and peers see no network
        # instead of silence.
        with ExitStack() as handover:
            devices = []
            for place, address in ends:
                devices.append(_device(place, address, applied))
                handover.callback(os.close, devices[-1])
            arguments = ["netem.forwarder", *map(str, devices)]
            forwarder, ready = stack.enter_context(
                helper(
                    "the link forwarder between the sites",
                    arguments,
                    {"seed": seed, **_settings(applied)},
                    pass_fds=devices,
                )
            )
        notes.append(f"the forwarder runs at {ready['priority']}")
        notes.append(f"TCP congestion control is {near.run(congestion_control)}")
        yield ForwarderPath(
            applied,
            tuple(notes),
            Site("near", _NEAR_ADDRESS, near.popen),
            Site("far", _FAR_ADDRESS, far.popen),
            forwarder,
        )


def _attainable(spec: LinkSpec) -> LinkSpec:
    """The link with no delay below the floor."""

    def attainable(direction: Direction) -> Direction:
        return replace(direction, delay_s=max(direction.delay_s, ROUND_TRIP_FLOOR_S / 2))

    return replace(
        spec,
        near_to_far=attainable(spec.near_to_far),
        far_to_near=attainable(spec.far_to_near),
    )


def _settings(applied: LinkSpec) -> dict[str, Any]:
    """What the forwarder is told: the delays without what it takes itself."""

    def less(direction: Direction) -> Direction:
        return replace(direction, delay_s=direction.delay_s - ROUND_TRIP_FLOOR_S / 2)

    told: dict[str, Any] = {}
    for name in DIRECTIONS:
        settings = way_settings(applied, name)
        told[name] = settings_to_json(replace(settings, direction=less(settings.direction)))
    return told


def _set_up(mtu_bytes: int) -> None:
    """The MTU and as long a queue as the kernel lets the device of this namespace have."""
    index = socket.if_nametoindex(_DEVICE)
    with IPRoute() as route:
        route.link("set", index=index, mtu=mtu_bytes)
        for packets in _DEVICE_QUEUE_PACKETS:
            try:
                route.link("set", index=index, txqlen=packets)
            except NetlinkError as error:
                if error.code != errno.ERANGE:
                    raise
            else:
                return


def _device(place: Namespace, address: str, applied: LinkSpec) -> int:
    """A TUN device inside a namespace, up; the descriptor of its user-space end."""

    def create() -> int:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        try:
            request = struct.pack(
                "16sH22x", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
            )
            fcntl.ioctl(device, _TUNSETIFF, request)
            fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO_ECN)
            _set_up(applied.mtu_bytes)
            set_address(_DEVICE, address, _PREFIX_LENGTH)
            allow_window(applied.bdp_bytes)
        except BaseException:
            os.close(device)
            raise
        return device

    try:
        return place.run(create)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENODEV, errno.EPERM, errno.EACCES):
            raise
        raise LinkError(
            f"/dev/net/tun cannot be used here ({error.strerror}): the forwarder needs the tun "
            "module, the device node and CAP_NET_ADMIN"
        ) from error
