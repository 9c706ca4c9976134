"""One direction of a link as tc-netem qdiscs on two hops: the bottleneck, then the way.

The bottleneck has the rate, the queue limit and the loss (or the marks in its place); the way has
delay, jitter, reordering, copies, damage and slots. Two, because a netem with both lets the wait in
its queue count towards the delay, which no real path does. The way has a rate too, ten times the
link's: without one, jitter would reorder packets.

Two things are put so that they mean here what they mean elsewhere. The rate counts IP bytes: the
kernel counts the 14 bytes of the Ethernet header as well, and an overhead of -14 takes them off.
Correlated loss becomes the Gilbert-Elliott chain with the same rate and correlation, since netem's
own mixing of draws would move the rate. Both hops have seeds of their own, made from the link's.
"""

import hashlib
import math
from dataclasses import dataclass

from netem.attributes import U32_MAX, Netem, NetemSlot
from netem.link import MIN_LIMIT_PACKETS, QUEUE_BDPS, Direction, DirectionName, LinkSpec
from netem.loss import GilbertElliott, IndependentLoss, Loss

_ETHERNET_BYTES = 14
_WAY_RATE_FACTOR = 10
_MAX_RATE = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Hops:
    """The two qdiscs of a direction, in the order packets meet them."""

    bottleneck: Netem
    way: Netem


def hops(spec: LinkSpec, name: DirectionName, change: int = 0) -> Hops:
    """A direction as it is after ``change`` changes, each of which starts new random streams."""
    one = spec.direction(name)
    rate = round(one.rate_bytes_per_s)
    bottleneck = Netem(
        limit_packets=spec.queue_packets(name),
        rate_bytes_per_s=rate,
        packet_overhead_bytes=-_ETHERNET_BYTES,
        loss=_kernel_loss(one.loss),
        ecn=one.ecn,
        seed=_seed(spec, f"{name} bottleneck {change}"),
    )
    way = Netem(
        # Without slots the bottleneck bounds what is on the way, and this hop never drops.
        limit_packets=spec.queue_packets(name) if one.slot else U32_MAX,
        rate_bytes_per_s=min(_WAY_RATE_FACTOR * rate, _MAX_RATE),
        packet_overhead_bytes=-_ETHERNET_BYTES,
        delay_ns=_ns(one.delay_s),
        jitter_ns=_ns(one.jitter_s),
        distribution=one.jitter_distribution,
        jitter_correlation=one.jitter_correlation,
        reorder=one.reorder,
        reorder_correlation=one.reorder_correlation,
        reorder_gap=one.reorder_gap,
        duplicate=one.duplicate,
        duplicate_correlation=one.duplicate_correlation,
        corrupt=one.corrupt,
        corrupt_correlation=one.corrupt_correlation,
        slot=_slot(one),
        seed=_seed(spec, f"{name} way {change}"),
    )
    return Hops(bottleneck, way)


def flow_limit_packets(spec: LinkSpec) -> int:
    """What a capped flow may have waiting: as much as on a link of the cap's rate."""
    cap = spec.per_flow_cap_bytes_per_s or 0.0
    return max(MIN_LIMIT_PACKETS, math.ceil(QUEUE_BDPS * cap * spec.rtt_s / spec.mtu_bytes))


def draws_by_packet(one: Direction) -> bool:
    """Whether something befalls single packets: an offload packet would be one draw for many."""
    return bool(one.loss_rate or one.reorder or one.duplicate or one.corrupt or one.slot)


def _kernel_loss(loss: Loss | None) -> Loss | None:
    if isinstance(loss, IndependentLoss) and loss.correlation:
        apart = 1 - loss.correlation
        return GilbertElliott(p=loss.probability * apart, r=(1 - loss.probability) * apart)
    return loss


def _slot(one: Direction) -> NetemSlot | None:
    if one.slot is None:
        return None
    return NetemSlot(
        _ns(one.slot.min_delay_s), _ns(one.slot.max_delay_s), one.slot.packets, one.slot.bytes
    )


def _seed(spec: LinkSpec, use: str) -> int | None:
    if spec.seed is None:
        return None
    return int.from_bytes(hashlib.blake2b(f"{spec.seed} {use}".encode(), digest_size=8).digest())


def _ns(value_s: float) -> int:
    return round(value_s * 1e9)
