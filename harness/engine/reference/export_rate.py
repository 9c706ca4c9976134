"""How fast a request's KV leaves the device, layer by layer, by the engine's own way."""

import statistics
import time
from dataclasses import dataclass
from typing import Literal

from harness.attention import KvDtype
from harness.engine.compute import Piece
from harness.engine.reference.cache import Cache
from harness.engine.reference.config import ModelConfig
from harness.engine.reference.outbox import open_outbox

REPEATS = 7


@dataclass(frozen=True, slots=True)
class ExportRate:
    """Of ``REPEATS`` exports of ``nbytes``, wall seconds."""

    nbytes: int
    median_s: float
    least_s: float
    most_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.median_s


def export_rate(
    config: ModelConfig, kv_dtype: KvDtype, device: Literal["cuda", "cpu"], tokens: int
) -> ExportRate:
    """All layers of one slot of ``tokens``; a first export, which is left out, has the memory."""
    cache = Cache(config, 1, tokens, dtype=kv_dtype, device=device)
    cache.lengths[0] = tokens
    outbox = open_outbox(cache)
    taken: list[Piece] = []
    times_s = []
    try:
        for _ in range(REPEATS + 1):
            taken.clear()
            start_s = time.perf_counter()
            for layer in range(len(cache.layers)):
                outbox.send(0, layer, 0, cache.export_layer(0, layer), True, taken.append)
            outbox.settle()
            times_s.append(time.perf_counter() - start_s)
    finally:
        outbox.close()
    nbytes = sum(len(piece.data) for piece in taken if piece.data is not None)
    times_s = times_s[1:]
    return ExportRate(nbytes, statistics.median(times_s), min(times_s), max(times_s))
