"""What an inter-cluster link is: two directions, each with its rate, delay, loss and queue.

A direction is a bottleneck followed by a way to travel. The bottleneck passes ``rate_bytes_per_s``
of IP bytes, holds ``limit_packets`` packets and loses some of them (``netem.loss``); the way delays
by ``delay_s`` +- jitter, and may reorder, duplicate or corrupt. Without ``reorder`` the order is
kept: an arrival is never before the one of the packet ahead. Probabilities are fractions.

The jitter is uniform in +-``jitter_s``, or ``jitter_s`` times a draw of mean 0 and deviation 1
(see ``netem.delay_tables``). ``per_flow_cap_bytes_per_s`` bounds every 5-tuple of either direction
by itself, as clouds do. ``seed`` makes loss and jitter repeatable where the backend can.

Of both directions the one from far to near carries the bulk; ``rate_bytes_per_s``, ``jitter_s``
and ``loss_rate`` of a link are that direction's.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

from netem.loss import IndependentLoss, Loss
from netem.units import format_duration_s, format_fraction, format_rate

DirectionName: TypeAlias = Literal["near_to_far", "far_to_near"]
DIRECTIONS: tuple[DirectionName, ...] = ("near_to_far", "far_to_near")
JitterDistribution: TypeAlias = Literal["uniform", "normal", "pareto", "paretonormal"]
MTU_BYTES = 1500
#: The kernel's own default; below the BDP of a short link it leaves room for TCP's bursts.
MIN_LIMIT_PACKETS = 1000
#: A queue below this many bandwidth-delay products drops at full rate and reads as loss.
QUEUE_BDPS = 1.5
MIN_RATE_BYTES_PER_S = 125.0
#: tc-netem's ``limit`` and ``gap`` are 32 bits wide.
_U32_MAX = 2**32 - 1
#: One more means no bound to the kernel.
_MAX_OF_SLOT = 2**31 - 2
_MAX_ONE_WAY_S = 274.0
_MIN_MTU_BYTES, _MAX_MTU_BYTES = 576, 65535


def printable(text: str) -> str:
    """A user's text on one line: what a terminal would take for a command becomes ``?``."""
    return "".join(c if c.isprintable() else "?" for c in text)


class LinkError(Exception):
    """A link that cannot be described, built or measured; the message says why and what to do.

    It is printable, whatever the names and paths in it hold.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


@dataclass(frozen=True, slots=True)
class Slot:
    """The path is open for one slot at a time: at most ``packets`` and ``bytes`` (0: no bound).

    Slots begin ``min_delay_s`` to ``max_delay_s`` apart.
    """

    min_delay_s: float
    max_delay_s: float
    packets: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Direction:
    """One way. ``limit_packets = None``: computed from the bandwidth-delay product.

    ``jitter_correlation`` and the like are of a draw with the one before it. ``reorder`` is the
    chance to overtake, that is to skip the delay; with ``reorder_gap`` n, at least n - 1 packets
    lie between two that do. ``ecn``: a loss marks a packet that can be marked instead.
    """

    rate_bytes_per_s: float
    delay_s: float
    jitter_s: float = 0.0
    jitter_distribution: JitterDistribution = "uniform"
    jitter_correlation: float = 0.0
    loss: Loss | None = None
    reorder: float = 0.0
    reorder_correlation: float = 0.0
    reorder_gap: int = 0
    duplicate: float = 0.0
    duplicate_correlation: float = 0.0
    corrupt: float = 0.0
    corrupt_correlation: float = 0.0
    ecn: bool = False
    slot: Slot | None = None
    limit_packets: int | None = None

    @property
    def loss_rate(self) -> float:
        """The share of packets that the loss model takes in the long run."""
        return self.loss.mean_rate if self.loss else 0.0

    def fault(self) -> str | None:
        """The first thing that makes this direction impossible, in words; None when it is sound."""
        if not (
            math.isfinite(self.rate_bytes_per_s) and self.rate_bytes_per_s >= MIN_RATE_BYTES_PER_S
        ):
            return "the rate must be at least 1kbit"
        if not 0 <= self.delay_s <= _MAX_ONE_WAY_S:
            return "the delay must lie between 0 and 274s (an rtt: between 0 and 548s)"
        if not 0 <= self.jitter_s <= self.delay_s:
            return (
                f"a jitter of {_text_s(self.jitter_s)} exceeds the one-way delay of "
                f"{_text_s(self.delay_s)} (half the rtt where only that is given), so it would "
                "be cut off; lower the jitter or raise the delay"
            )
        return self._fault_of_chances() or self._fault_of_counts()

    def _fault_of_chances(self) -> str | None:
        for name in (
            "jitter_correlation", "reorder", "reorder_correlation", "duplicate",
            "duplicate_correlation", "corrupt", "corrupt_correlation",
        ):  # fmt: skip
            if not 0 <= getattr(self, name) <= 1:
                return f"{name} must lie between 0% and 100%"
        if self.reorder and not self.delay_s:
            return "reorder needs a delay for a packet to overtake in"
        if self.reorder_gap and not self.reorder:
            return "reorder_gap needs a reorder chance"
        return self.loss.fault() if self.loss else None

    def _fault_of_counts(self) -> str | None:
        if not 0 <= self.reorder_gap <= _U32_MAX:
            return "reorder_gap must lie between 0 and 2^32 - 1"
        if self.limit_packets is not None and not 0 < self.limit_packets <= _U32_MAX:
            return "limit_packets must lie between 1 and 2^32 - 1"
        if (slot := self.slot) is None:
            return None
        if not (0 <= slot.min_delay_s <= slot.max_delay_s <= _MAX_ONE_WAY_S and slot.max_delay_s):
            return "slot: 0 <= min_delay <= max_delay <= 274s must hold, and max_delay be above 0"
        if not (0 <= slot.packets <= _MAX_OF_SLOT and 0 <= slot.bytes <= _MAX_OF_SLOT):
            return "slot: packets and bytes must lie between 0 and 2^31 - 2"
        return None

    def scaled(self, time_scale: float, byte_scale: float) -> "Direction":
        """As ``LinkSpec.scaled``."""
        slot = self.slot and replace(
            self.slot,
            min_delay_s=self.slot.min_delay_s / time_scale,
            max_delay_s=self.slot.max_delay_s / time_scale,
        )
        return replace(
            self,
            rate_bytes_per_s=self.rate_bytes_per_s * time_scale / byte_scale,
            delay_s=self.delay_s / time_scale,
            jitter_s=self.jitter_s / time_scale,
            slot=slot,
        )


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """One link between the site near and the site far; LinkError when it is impossible."""

    name: str
    near_to_far: Direction
    far_to_near: Direction
    mtu_bytes: int = MTU_BYTES
    per_flow_cap_bytes_per_s: float | None = None
    seed: int | None = None
    #: Properties of the real link that this description leaves out, in words.
    not_applied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in DIRECTIONS:
            if fault := self.direction(name).fault():
                place = "" if self.is_symmetric else f" {_spaced(name)}"
                raise LinkError(f"link {self.name!r}{place}: {fault}")
        if not _MIN_MTU_BYTES <= self.mtu_bytes <= _MAX_MTU_BYTES:
            raise LinkError(f"link {self.name!r}: the mtu must lie between 576B and 65535B")
        cap = self.per_flow_cap_bytes_per_s
        if cap is not None and not (math.isfinite(cap) and cap >= MIN_RATE_BYTES_PER_S):
            raise LinkError(f"link {self.name!r}: per_flow_cap must be at least 1kbit")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise LinkError(f"link {self.name!r}: the seed must lie between 0 and 2^64 - 1")

    def direction(self, name: DirectionName) -> Direction:
        return self.near_to_far if name == "near_to_far" else self.far_to_near

    @property
    def is_symmetric(self) -> bool:
        return self.near_to_far == self.far_to_near

    @property
    def rtt_s(self) -> float:
        """The sum of both delays."""
        return self.near_to_far.delay_s + self.far_to_near.delay_s

    @property
    def rate_bytes_per_s(self) -> float:
        """Of the direction that carries the bulk."""
        return self.far_to_near.rate_bytes_per_s

    @property
    def jitter_s(self) -> float:
        """Of the direction that carries the bulk."""
        return self.far_to_near.jitter_s

    @property
    def loss_rate(self) -> float:
        """Of the direction that carries the bulk."""
        return self.far_to_near.loss_rate

    @property
    def bdp_bytes(self) -> float:
        """Bandwidth-delay product over the round trip, of the faster direction."""
        rates = (self.near_to_far.rate_bytes_per_s, self.far_to_near.rate_bytes_per_s)
        return max(rates) * self.rtt_s

    def bdp_queue_packets(self, name: DirectionName) -> int:
        """1.5 bandwidth-delay products of a direction over the round trip, in full packets."""
        bdp_bytes = self.direction(name).rate_bytes_per_s * self.rtt_s
        return min(math.ceil(QUEUE_BDPS * bdp_bytes / self.mtu_bytes), _U32_MAX)

    def queue_packets(self, name: DirectionName) -> int:
        """The limit that applies: as given, else 1.5 BDP but at least the kernel's default."""
        given = self.direction(name).limit_packets
        if given is not None:
            return given
        return max(MIN_LIMIT_PACKETS, self.bdp_queue_packets(name))

    def both(self, **changes: Any) -> "LinkSpec":  # Any: fields of Direction
        """The link with the same fields of both directions replaced."""
        return replace(
            self,
            near_to_far=replace(self.near_to_far, **changes),
            far_to_near=replace(self.far_to_near, **changes),
        )

    def scaled(self, time_scale: float, byte_scale: float) -> "LinkSpec":
        """The link to emulate when durations shrink by ``time_scale`` and bytes by ``byte_scale``.

        A given ``limit_packets`` is kept: packets are not scaled.
        """
        if not (0 < time_scale < math.inf and 0 < byte_scale < math.inf):
            raise LinkError("time_scale and byte_scale must be finite and above 0")
        cap = self.per_flow_cap_bytes_per_s
        return replace(
            self,
            near_to_far=self.near_to_far.scaled(time_scale, byte_scale),
            far_to_near=self.far_to_near.scaled(time_scale, byte_scale),
            per_flow_cap_bytes_per_s=None if cap is None else cap * time_scale / byte_scale,
        )

    def warnings(self) -> tuple[str, ...]:
        """What is possible but does something else than its name says."""
        told = []
        for name in DIRECTIONS:
            one = self.direction(name)
            place = "" if self.is_symmetric else f"{_spaced(name)}: "
            told += [f"{place}{text}" for text in self._warnings_of(name, one)]
        return tuple(dict.fromkeys(told))

    def _warnings_of(self, name: DirectionName, one: Direction) -> list[str]:
        told = []
        needed = self.bdp_queue_packets(name)
        if one.limit_packets is not None and one.limit_packets < needed:
            told.append(
                f"limit_packets = {one.limit_packets} is below 1.5 bandwidth-delay products "
                f"({needed} packets): at full rate the queue drops, which reads as loss"
            )
        if one.jitter_distribution != "uniform" and 3 * one.jitter_s > one.delay_s:
            told.append(
                f"3 deviations of the {one.jitter_distribution} jitter exceed the delay of "
                f"{_text_s(one.delay_s)}: early arrivals are cut off at 0"
            )
        if one.ecn and not one.loss:
            told.append("ecn has no effect without loss: only a loss becomes a mark")
        cap = self.per_flow_cap_bytes_per_s
        if cap is not None and cap >= one.rate_bytes_per_s:
            told.append("per_flow_cap has no effect: it is not below the rate")
        return told

    def __str__(self) -> str:
        if self.is_symmetric:
            ways = _words(self.far_to_near, f"rtt {_text_s(self.rtt_s)}")
        else:
            ways = "; ".join(
                f"{_spaced(name)} {_words(one, f'delay {_text_s(one.delay_s)}')}"
                for name in DIRECTIONS
                for one in [self.direction(name)]
            )
        cap = self.per_flow_cap_bytes_per_s
        capped = "" if cap is None else f"; {format_rate(cap)} a flow at most"
        return f"{self.name}: {ways}{capped}"


def symmetric(
    name: str,
    rate_bytes_per_s: float,
    rtt_s: float,
    jitter_s: float = 0.0,
    loss: float | Loss = 0.0,
    limit_packets: int | None = None,
    **more: Any,
) -> LinkSpec:
    """A link alike in both directions, half the round trip each; a number is independent loss.

    ``more``: other fields of ``Direction`` and of ``LinkSpec``.
    """
    model = loss if not isinstance(loss, float | int) else IndependentLoss(loss) if loss else None
    of_link = {field.name for field in fields(LinkSpec)}
    direction = Direction(
        rate_bytes_per_s,
        rtt_s / 2,
        jitter_s,
        loss=model,
        limit_packets=limit_packets,
        **{key: value for key, value in more.items() if key not in of_link},
    )
    return LinkSpec(
        name, direction, direction, **{key: value for key, value in more.items() if key in of_link}
    )


def _words(one: Direction, delay: str) -> str:
    """A direction in words; ``delay`` has them for its delay, or for the round trip."""
    parts = [format_rate(one.rate_bytes_per_s), delay]
    if one.jitter_s:
        parts.append(f"jitter {_text_s(one.jitter_s)}")
    chances = {
        "loss": one.loss_rate,
        "reorder": one.reorder,
        "duplicate": one.duplicate,
        "corrupt": one.corrupt,
    }
    # Four digits are enough for a reader.
    parts += [
        f"{name} {format_fraction(float(f'{value:.4g}'))}"
        for name, value in chances.items()
        if value
    ]
    return ", ".join(parts)


def _spaced(name: DirectionName) -> str:
    return name.replace("_", " ")


def _text_s(value_s: float) -> str:
    """A duration for a message: four digits are enough there."""
    return format_duration_s(float(f"{value_s:.4g}"))
