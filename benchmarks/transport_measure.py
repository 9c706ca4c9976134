"""One measured run over an open wire: the transport's two processes, or a peer's.

A stream is measured over a window in its middle, so neither the start nor the end counts: goodput
is the payload that TCP acknowledged between two marks of the sender, CPU the user and system time
of both processes between their marks. TCP's count holds frame heads (and TLS records); it is
brought to payload by the ratio of the two over the whole run, which is known exactly.

A prefill is one transfer at a time, its layers ready at equal steps of a prefill that lasts as long
as the link needs for the bytes: where layer-wise transfer hides most. Its goodput counts from the
prefill's start to the acknowledgement.
"""

import math
import secrets
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.transport_end import Settings
from benchmarks.transport_links import Wire
from benchmarks.transport_peers import PeerRun, run_iperf3, run_mooncake
from harness.core import TransportError
from harness.transport.tls import TlsFiles
from netem.control import Helper, helper
from netem.site import Site

LAYERS, IN_FLIGHT = 16, 4
MAX_TRANSFER_BYTES, _MIN_TRANSFER_BYTES, _GRAIN_BYTES = 64 * 2**20, 2**20, LAYERS * 4096
#: A transfer lasts so long, so that the last ones under way do not keep a slow link for minutes.
_TRANSFER_S, _PREFILL_S = 0.125, 0.3
#: Of a link's rate, what is left of it for payload with full packets of 1500 bytes.
_PAYLOAD_SHARE = 0.95
_MIN_WARM_UP_S, _WARM_UP_RTTS = 0.5, 15
_PREFILLS = 3
_ANSWERS_WITHIN_S = 120.0


@dataclass(frozen=True, slots=True)
class Variant:
    """What is run. ``prefill``: transfers beside prefills instead of a stream."""

    tool: str
    connections: int
    checksum: bool = False
    layerwise: bool = True
    tls: bool = False
    prefill: bool = False

    def __str__(self) -> str:
        words = [self.tool, f"x{self.connections}"]
        if self.tool == "prfaas":
            words.append("checksum" if self.checksum else "no checksum")
            words += [name for name in ("tls", "prefill") if getattr(self, name)]
            words += [] if self.layerwise else ["after the last layer"]
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Sample:
    """One run's figures; ``details`` goes into the row as it is."""

    goodput_bytes_per_s: float
    cpu_s_per_gb: float
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class How:
    """How every run of this benchmark is made."""

    window_s: int
    congestion_control: str | None
    mooncake_python: str
    tls: TlsFiles | None


@dataclass(frozen=True, slots=True)
class Ends:
    """The transport's two processes on a wire."""

    wire: Wire
    sender: Helper
    receiver: Helper


@contextmanager
def open_ends(wire: Wire) -> Iterator[Ends]:
    """Start both processes; they serve any number of runs."""
    with _end("sender", wire.near) as sender, _end("receiver", wire.far) as receiver:
        yield Ends(wire, sender, receiver)


@contextmanager
def _end(role: str, site: Site) -> Iterator[Helper]:
    with helper(
        f"the benchmark's {role}",
        ["benchmarks.transport_end", role],
        {"max_transfer_bytes": MAX_TRANSFER_BYTES, "host": site.address},
        popen=site.popen,
        timeout_s=_ANSWERS_WITHIN_S,
    ) as (running, _):
        yield running


def measure(variant: Variant, ends: Ends, how: How) -> Sample:
    """Run one variant once."""
    wire = ends.wire
    if variant.tool == "iperf3":
        omit_s = math.ceil(_warm_up_s(wire))
        return _of_peer(
            run_iperf3(wire, variant.connections, how.window_s, omit_s, how.congestion_control)
        )
    if variant.tool == "mooncake":
        size = _transfer_bytes(wire, variant, _TRANSFER_S * IN_FLIGHT)
        return _of_peer(run_mooncake(wire, how.mooncake_python, size, how.window_s))
    span_s = _PREFILL_S if variant.prefill else _TRANSFER_S
    transfer_bytes = _transfer_bytes(wire, variant, span_s)
    settings = Settings(
        secret=secrets.token_hex(32),
        connections=variant.connections,
        checksum=variant.checksum,
        layers=LAYERS,
        transfer_bytes=transfer_bytes,
        in_flight=1 if variant.prefill else IN_FLIGHT,
        congestion_control=how.congestion_control,
        tls=_paths(how.tls) if variant.tls else None,
    )
    given = {name: getattr(settings, name) for name in settings.__struct_fields__}
    port = ends.receiver.ask({"op": "begin", "settings": given})["port"]
    peer = [wire.far.address, port]
    ends.sender.ask({"op": "begin", "settings": given, "peer": peer})
    run = _prefills if variant.prefill else _stream
    goodput, cpu_s_per_gb, details = run(ends, variant, settings, how)
    return Sample(goodput, cpu_s_per_gb, {"transfer_bytes": transfer_bytes, **details})


def _stream(
    ends: Ends, _variant: Variant, _settings: Settings, how: How
) -> tuple[float, float, dict[str, Any]]:
    ends.sender.ask({"op": "stream"})
    time.sleep(_warm_up_s(ends.wire))
    begin = [end.ask({"op": "mark"}) for end in (ends.sender, ends.receiver)]
    time.sleep(how.window_s)
    until = [end.ask({"op": "mark"}) for end in (ends.sender, ends.receiver)]
    whole = _finish(ends)
    spans_s = [(b["mono_ns"] - a["mono_ns"]) / 1e9 for a, b in zip(begin, until, strict=True)]
    acked_bytes = until[0]["acked_bytes"] - begin[0]["acked_bytes"]
    if acked_bytes <= 0:
        raise TransportError("nothing was acknowledged in the window, or a connection was replaced")
    goodput = acked_bytes * whole["payload_bytes"] / whole["acked_bytes"] / spans_s[0]
    shares = [
        (b["cpu_s"] - a["cpu_s"]) / span_s
        for a, b, span_s in zip(begin, until, spans_s, strict=True)
    ]
    sender, receiver = (share / (goodput / 1e9) for share in shares)
    return goodput, sender + receiver, {
        "sender_cpu_s_per_gb": sender,
        "receiver_cpu_s_per_gb": receiver,
        "threads": {"sender": until[0]["threads"], "receiver": until[1]["threads"]},
    }  # fmt: skip


def _prefills(
    ends: Ends, variant: Variant, settings: Settings, _how: How
) -> tuple[float, float, dict[str, Any]]:
    expected = ends.wire.expected_bytes_per_s(variant.connections)
    assert expected is not None, "prefills are timed by the link's rate"
    prefill_s = settings.transfer_bytes / (_PAYLOAD_SHARE * expected)
    order = {"op": "prefill", "prefill_s": prefill_s, "layerwise": variant.layerwise}
    ends.sender.ask({**order, "count": 1})
    begin = [end.ask({"op": "mark"}) for end in (ends.sender, ends.receiver)]
    exposed_s = ends.sender.ask({**order, "count": _PREFILLS})["exposed_s"]
    until = [end.ask({"op": "mark"}) for end in (ends.sender, ends.receiver)]
    _finish(ends)
    cpu_s = sum(b["cpu_s"] - a["cpu_s"] for a, b in zip(begin, until, strict=True))
    exposed = statistics.median(exposed_s)
    goodput = settings.transfer_bytes / (prefill_s + exposed)
    return goodput, cpu_s / (_PREFILLS * settings.transfer_bytes / 1e9), {
        "prefill_s": prefill_s,
        "exposed_s": exposed,
        "threads": {"sender": until[0]["threads"], "receiver": until[1]["threads"]},
    }  # fmt: skip


def _finish(ends: Ends) -> dict[str, Any]:
    """End the run; the totals of the sender, which the receiver must have counted too."""
    sent = ends.sender.ask({"op": "end"})
    received = ends.receiver.ask({"op": "end", "payload_bytes": sent["payload_bytes"]})
    if received["payload_bytes"] != sent["payload_bytes"]:
        raise TransportError(
            f"{sent['payload_bytes']} bytes were acknowledged and {received['payload_bytes']} "
            "received"
        )
    return sent


def _of_peer(run: PeerRun) -> Sample:
    return Sample(run.goodput_bytes_per_s, run.cpu_s_per_gb, {"retransmits": run.retransmits})


def _transfer_bytes(wire: Wire, variant: Variant, span_s: float) -> int:
    """As many bytes as the link carries in about ``span_s``, at least a round trip's."""
    expected = wire.expected_bytes_per_s(variant.connections)
    if expected is None:
        return MAX_TRANSFER_BYTES
    wanted = _PAYLOAD_SHARE * expected * max(span_s, wire.rtt_s)
    within = min(max(wanted, _MIN_TRANSFER_BYTES), MAX_TRANSFER_BYTES)
    return int(within) // _GRAIN_BYTES * _GRAIN_BYTES


def _warm_up_s(wire: Wire) -> float:
    return max(_MIN_WARM_UP_S, _WARM_UP_RTTS * wire.rtt_s)


def _paths(files: TlsFiles | None) -> tuple[str, str, str]:
    assert files is not None, "a variant with TLS comes with its files"
    certificate, key, authority = (str(path) for path in asdict(files).values())
    return certificate, key, authority
