"""What benchmarks/transfer_exposure.py measures: hybrids, prefills and links, and their model."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.architecture import Architecture, wire_layer_bytes
from harness.attention import Linear, Mla
from harness.transfer_model import Exposure, FloatArray, Pieces, exposure, prefill_pieces
from harness.transfer_rate import (
    Flows,
    SlowStart,
    TcpPath,
    link_path,
    payload_bytes_per_s,
)
from netem.link import LinkSpec, symmetric

MBIT = 125e3
LAYERS = 24
#: KDA layers to each MLA layer, which closes its group.
PATTERNS = (3, 5, 7)
CONNECTIONS = (1, 4)
#: What sending all bytes of a transfer takes, by the model.
SENDING_S = 0.5
#: Below the cap, so that the pacing and not the cap's queue decides what a connection carries.
PACING_BELOW_CAP = 0.97
CHUNK_S = 5e-3
LINKS = {
    link.name: link
    for link in (
        symmetric("near", 200 * MBIT, 2e-3),
        symmetric("far", 100 * MBIT, 40e-3),
        symmetric("capped", 200 * MBIT, 10e-3, per_flow_cap_bytes_per_s=30 * MBIT),
    )
}


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt; the last chunk of one in chunks is short."""

    name: str
    tokens: int
    chunk_tokens: int | None
    prefill_s: float

    def cost_s(self, new: FloatArray, _cached: FloatArray) -> FloatArray:
        """Slightly more than linear, as attention is."""
        part = new / self.tokens
        return self.prefill_s * (0.8 * part + 0.2 * part**2)


PREFILLS = (
    Prefill("whole", tokens=32_768, chunk_tokens=None, prefill_s=0.3),
    Prefill("chunked", tokens=8192, chunk_tokens=3072, prefill_s=0.4),
)


def hybrid(kda_per_mla: int) -> Architecture:
    """Layers as in ``profiles/models/prfaas-1t.json``, in the given pattern."""
    kda = Linear("kda", 64, 128, 128, 4, 24_576).layer("kda", "bf16")
    mla = Mla(512, 64).layer("mla", "bf16")
    group = (*[kda] * kda_per_mla, mla)
    layers = group * (LAYERS // len(group))
    return Architecture(f"{kda_per_mla}:1", Path(), layers, {})


def chunk_bytes(path: TcpPath, flows: Flows) -> int:
    """What a connection sends in ``CHUNK_S``: so much later than the others may one of them end."""
    of_one = payload_bytes_per_s(path, flows) / flows.connections
    return min(max(round(CHUNK_S * of_one), 16 * 1024), 256 * 1024)


@dataclass(frozen=True, slots=True)
class Row:
    """One combination; what is measured is ``play``, what is expected ``modelled``."""

    link: str
    connections: int
    kda_per_mla: int
    prefill: Prefill
    layerwise: bool
    cold: bool = False

    def described(self) -> dict[str, Any]:
        return {
            "link": self.link,
            "connections": self.connections,
            "pattern": f"{self.kda_per_mla}:1",
            "prefill": self.prefill.name,
            "layerwise": self.layerwise,
            "cold": self.cold,
        }

    def flows(self, link: LinkSpec) -> Flows:
        cap, path = link.per_flow_cap_bytes_per_s, link_path(link)
        pacing = None if cap is None else cap * path.payload_share * PACING_BELOW_CAP
        return Flows(self.connections, pacing_bytes_per_s=pacing)

    def pieces(self, link: LinkSpec) -> Pieces:
        """With the bytes that cross the link, such that sending them takes ``SENDING_S``."""
        made = prefill_pieces(
            hybrid(self.kda_per_mla),
            self.prefill.tokens,
            self.prefill.cost_s,
            chunk_tokens=self.prefill.chunk_tokens,
        )
        rate = payload_bytes_per_s(link_path(link), self.flows(link))
        sizes = made.sizes_bytes.astype(int).ravel().tolist()
        wire = wire_layer_bytes(sizes, sum(sizes) / (rate * SENDING_S))
        made.sizes_bytes.flat[:] = wire
        return made

    def modelled(self, link: LinkSpec) -> Exposure:
        path, flows = link_path(link), self.flows(link)
        return exposure(
            self.pieces(link),
            payload_bytes_per_s(path, flows),
            layerwise=self.layerwise,
            one_way_s=link.far_to_near.delay_s,
            slow_start=SlowStart.of(path, flows) if self.cold else None,
        )

    def play(self, link: LinkSpec) -> dict[str, Any]:
        """What the sender is told to do."""
        release_s, sizes = self.pieces(link).in_order()
        moving = sizes > 0
        count = int(moving.sum())
        flows = self.flows(link)
        return {
            "release_s": release_s[moving].tolist()
            if self.layerwise
            else [self.prefill.prefill_s] * count,
            "sizes_bytes": sizes[moving].astype(int).tolist(),
            "connections": self.connections,
            "pacing_bytes_per_s": flows.pacing_bytes_per_s,
            "chunk_bytes": chunk_bytes(link_path(link), flows),
            "cold": self.cold,
        }


def rows_of(link: str, *, cold: bool) -> list[Row]:
    """All combinations on one link; of cold connections those of one pattern and prefill."""
    rows = [
        Row(link, connections, pattern, prefill, layerwise)
        for connections in CONNECTIONS
        for pattern in PATTERNS
        for prefill in PREFILLS
        for layerwise in (True, False)
    ]
    if cold:
        rows += [
            replace(row, cold=True)
            for row in rows
            if row.kda_per_mla == PATTERNS[0] and row.prefill is PREFILLS[0]
        ]
    return rows
