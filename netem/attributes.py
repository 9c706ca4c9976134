"""One tc-netem qdisc as a record, and as the bytes the kernel reads and writes.

``struct tc_netem_qopt`` and TCA_NETEM_* of Linux include/uapi/linux/pkt_sched.h, every attribute
but TCA_NETEM_PAD. Probabilities are scaled by 2^32 - 1; delays travel in nanoseconds (LATENCY64,
JITTER64) with the older fields filled in ticks of 64 ns; a rate above 2^32 - 1 bytes/s needs
RATE64. Gilbert-Elliott loss is p, r, h = 1 - loss in the bad state, k1 = loss in the good one.

The kernel keeps what a change does not send: a table, a slot, a correlation, a marking. So all of
them are sent always, as zeros where they are off, and a uniform table where there is none.
"""

import struct
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from pyroute2.netlink import nla

from netem.delay_tables import delay_table
from netem.link import JitterDistribution, LinkError
from netem.loss import FourStateLoss, GilbertElliott, IndependentLoss, Loss

U32_MAX = 2**32 - 1
_TICK_NS = 64
_TCA_OPTIONS = 2
#: Messages kept: a change takes several times as long to put into words as to send.
_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class NetemSlot:
    """Slots between two delays apart, each for so many packets and bytes (0: any number)."""

    min_delay_ns: int
    max_delay_ns: int
    packets: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Netem:
    """One netem qdisc. ``rate_bytes_per_s`` 0 means none; the packet overhead counts towards it.

    ``distribution`` and ``seed`` are None where the kernel does not tell.
    """

    limit_packets: int
    rate_bytes_per_s: int = 0
    packet_overhead_bytes: int = 0
    delay_ns: int = 0
    jitter_ns: int = 0
    distribution: JitterDistribution | None = "uniform"
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
    slot: NetemSlot | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.jitter_ns and not self.rate_bytes_per_s:
            raise LinkError("netem with jitter and no rate would reorder packets: give a rate")


class options(nla):  # type: ignore[misc]  # noqa: N801  # pyroute2 is untyped and wants this name
    fields = (
        ("delay", "I"),
        ("limit", "I"),
        ("loss", "I"),
        ("gap", "I"),
        ("duplicate", "I"),
        ("jitter", "I"),
    )
    nla_map = (
        ("TCA_NETEM_UNSPEC", "none"),
        ("TCA_NETEM_CORR", "correlations"),
        ("TCA_NETEM_DELAY_DIST", "cdata"),
        ("TCA_NETEM_REORDER", "chance"),
        ("TCA_NETEM_CORRUPT", "chance"),
        ("TCA_NETEM_LOSS", "loss_model"),
        ("TCA_NETEM_RATE", "rate"),
        ("TCA_NETEM_ECN", "uint32"),
        ("TCA_NETEM_RATE64", "uint64"),
        ("TCA_NETEM_PAD", "hex"),
        ("TCA_NETEM_LATENCY64", "int64"),
        ("TCA_NETEM_JITTER64", "int64"),
        ("TCA_NETEM_SLOT", "slot"),
        ("TCA_NETEM_SLOT_DIST", "cdata"),
        ("TCA_NETEM_PRNG_SEED", "uint64"),
    )

    class correlations(nla):  # type: ignore[misc]  # noqa: N801  # see above
        fields = (("delay", "I"), ("loss", "I"), ("duplicate", "I"))

    class chance(nla):  # type: ignore[misc]  # noqa: N801  # see above
        fields = (("probability", "I"), ("correlation", "I"))

    class rate(nla):  # type: ignore[misc]  # noqa: N801  # see above
        fields = (
            ("rate", "I"),
            ("packet_overhead", "i"),
            ("cell_size", "I"),
            ("cell_overhead", "i"),
        )

    class slot(nla):  # type: ignore[misc]  # noqa: N801  # see above
        fields = (
            ("min_delay", "q"),
            ("max_delay", "q"),
            ("max_packets", "i"),
            ("max_bytes", "i"),
            ("dist_delay", "q"),
            ("dist_jitter", "q"),
        )

    class loss_model(nla):  # type: ignore[misc]  # noqa: N801  # see above
        nla_map = (
            ("NETEM_LOSS_UNSPEC", "none"),
            ("NETEM_LOSS_GI", "four_state"),
            ("NETEM_LOSS_GE", "gilbert_elliott"),
        )

        class four_state(nla):  # type: ignore[misc]  # noqa: N801  # see above
            fields = (("p13", "I"), ("p31", "I"), ("p32", "I"), ("p14", "I"), ("p23", "I"))

        class gilbert_elliott(nla):  # type: ignore[misc]  # noqa: N801  # see above
            fields = (("p", "I"), ("r", "I"), ("h", "I"), ("k1", "I"))


@lru_cache(maxsize=_REMEMBERED)
def encode(netem: Netem) -> bytes:
    """TCA_OPTIONS with its header."""
    message = options()
    message.setvalue(_fields(netem))
    message.encode()
    data = bytearray(message.data)
    struct.pack_into("=H", data, 2, _TCA_OPTIONS)
    return bytes(data)


@lru_cache(maxsize=_REMEMBERED)
def decode(data: bytes) -> Netem:
    """What TCA_OPTIONS, with its header, says; of a kernel's dump, what the kernel runs."""
    message = options(data)
    message.decode()
    attributes = dict(message["attrs"])
    zeros = {"delay": 0, "loss": 0, "duplicate": 0}
    correlations = {
        key: _fraction((attributes.get("TCA_NETEM_CORR") or zeros)[key]) for key in zeros
    }
    rate = attributes.get("TCA_NETEM_RATE") or {"rate": 0, "packet_overhead": 0}
    reorder, reorder_correlation = _chance(attributes.get("TCA_NETEM_REORDER"))
    corrupt, corrupt_correlation = _chance(attributes.get("TCA_NETEM_CORRUPT"))
    return Netem(
        limit_packets=message["limit"],
        rate_bytes_per_s=attributes.get("TCA_NETEM_RATE64", rate["rate"]),
        packet_overhead_bytes=rate["packet_overhead"],
        delay_ns=attributes.get("TCA_NETEM_LATENCY64", message["delay"] * _TICK_NS),
        jitter_ns=attributes.get("TCA_NETEM_JITTER64", message["jitter"] * _TICK_NS),
        distribution=_distribution(attributes.get("TCA_NETEM_DELAY_DIST")),
        jitter_correlation=correlations["delay"],
        loss=_loss(message, attributes.get("TCA_NETEM_LOSS"), correlations["loss"]),
        reorder=reorder,
        reorder_correlation=reorder_correlation,
        reorder_gap=message["gap"],
        duplicate=_fraction(message["duplicate"]),
        duplicate_correlation=correlations["duplicate"],
        corrupt=corrupt,
        corrupt_correlation=corrupt_correlation,
        ecn=bool(attributes.get("TCA_NETEM_ECN", 0)),
        slot=_slot(attributes.get("TCA_NETEM_SLOT")),
        seed=attributes.get("TCA_NETEM_PRNG_SEED"),
    )


def on_the_wire(netem: Netem) -> Netem:
    """``netem`` with the values that its encoding can tell apart."""
    return decode(encode(netem))


def untold_aside(netem: Netem) -> Netem:
    """Less what no kernel gives back (tables) or only newer ones do (the seed)."""
    return replace(netem, distribution=None, seed=None)


def told_by_a_dump(netem: Netem) -> Netem:
    """``on_the_wire``, ``untold_aside``."""
    return untold_aside(on_the_wire(netem))


def _fields(netem: Netem) -> dict[str, Any]:
    loss, correlation = netem.loss, 0.0
    independent = 0.0
    if isinstance(loss, IndependentLoss):
        independent, correlation = loss.probability, loss.correlation
    return {
        "delay": min(netem.delay_ns // _TICK_NS, U32_MAX),
        "limit": netem.limit_packets,
        "loss": _scaled(independent),
        # A gap of 0 switches reordering off; 1 lets every packet overtake.
        "gap": max(netem.reorder_gap, 1) if netem.reorder else 0,
        "duplicate": _scaled(netem.duplicate),
        "jitter": min(netem.jitter_ns // _TICK_NS, U32_MAX),
        "attrs": [
            ("TCA_NETEM_LATENCY64", netem.delay_ns),
            ("TCA_NETEM_JITTER64", netem.jitter_ns),
            ("TCA_NETEM_DELAY_DIST", delay_table(netem.distribution or "uniform")),
            (
                "TCA_NETEM_CORR",
                {
                    "delay": _scaled(netem.jitter_correlation),
                    "loss": _scaled(correlation),
                    "duplicate": _scaled(netem.duplicate_correlation),
                },
            ),
            ("TCA_NETEM_REORDER", _pair(netem.reorder, netem.reorder_correlation)),
            ("TCA_NETEM_CORRUPT", _pair(netem.corrupt, netem.corrupt_correlation)),
            ("TCA_NETEM_ECN", int(netem.ecn)),
            *_loss_attributes(loss),
            *_rate_attributes(netem),
            *_slot_attributes(netem.slot),
            *([] if netem.seed is None else [("TCA_NETEM_PRNG_SEED", netem.seed)]),
        ],
    }


def _loss_attributes(loss: Loss | None) -> list[tuple[str, Any]]:
    """A chain; without this attribute the kernel returns to independent loss."""
    match loss:
        case GilbertElliott():
            kind = "NETEM_LOSS_GE"
            chances = {
                "p": _scaled(loss.p),
                "r": _scaled(loss.r),
                "h": U32_MAX - _scaled(loss.loss_bad),
                "k1": _scaled(loss.loss_good),
            }
        case FourStateLoss():
            kind = "NETEM_LOSS_GI"
            names = ("p13", "p31", "p32", "p14", "p23")
            chances = {name: _scaled(getattr(loss, name)) for name in names}
        case _:
            return []
    return [("TCA_NETEM_LOSS", {"attrs": [(kind, chances)]})]


def _rate_attributes(netem: Netem) -> list[tuple[str, Any]]:
    rate = {
        "rate": min(netem.rate_bytes_per_s, U32_MAX),
        "packet_overhead": netem.packet_overhead_bytes,
        "cell_size": 0,
        "cell_overhead": 0,
    }
    large = netem.rate_bytes_per_s > U32_MAX
    rate64 = [("TCA_NETEM_RATE64", netem.rate_bytes_per_s)] if large else []
    return [*rate64, ("TCA_NETEM_RATE", rate)]


def _slot_attributes(slot: NetemSlot | None) -> list[tuple[str, Any]]:
    if slot is None:
        names = ("min_delay", "max_delay", "max_packets", "max_bytes", "dist_delay", "dist_jitter")
        return [("TCA_NETEM_SLOT", dict.fromkeys(names, 0))]
    fields = {
        "min_delay": slot.min_delay_ns,
        "max_delay": slot.max_delay_ns,
        "max_packets": slot.packets,
        "max_bytes": slot.bytes,
        # Where a table was ever set the kernel draws from it and ignores the bounds: one that
        # spans them is sent along.
        "dist_delay": (slot.min_delay_ns + slot.max_delay_ns) // 2,
        "dist_jitter": (slot.max_delay_ns - slot.min_delay_ns) // 2,
    }
    return [("TCA_NETEM_SLOT", fields), ("TCA_NETEM_SLOT_DIST", delay_table("uniform"))]


def _loss(message: Any, model: Any, correlation: float) -> Loss | None:
    if model is not None:
        ((kind, scaled),) = model["attrs"]
        if kind == "NETEM_LOSS_GE":
            bad = _fraction(U32_MAX - scaled["h"])
            return GilbertElliott(
                _fraction(scaled["p"]), _fraction(scaled["r"]), bad, _fraction(scaled["k1"])
            )
        names = ("p13", "p31", "p32", "p23", "p14")
        return FourStateLoss(*(_fraction(scaled[name]) for name in names))
    return IndependentLoss(_fraction(message["loss"]), correlation) if message["loss"] else None


def _slot(fields: Any) -> NetemSlot | None:
    if fields is None or not fields["max_delay"]:
        return None
    return NetemSlot(
        fields["min_delay"], fields["max_delay"], fields["max_packets"], fields["max_bytes"]
    )


def _distribution(table: Any) -> JitterDistribution | None:
    names: tuple[JitterDistribution, ...] = ("uniform", "normal", "pareto", "paretonormal")
    return next((name for name in names if table == delay_table(name)), None)


def _pair(probability: float, correlation: float) -> dict[str, int]:
    return {"probability": _scaled(probability), "correlation": _scaled(correlation)}


def _chance(pair: Any) -> tuple[float, float]:
    if pair is None:
        return 0.0, 0.0
    return _fraction(pair["probability"]), _fraction(pair["correlation"])


def _scaled(fraction: float) -> int:
    return round(fraction * U32_MAX)


def _fraction(scaled: int) -> float:
    return scaled / U32_MAX
