"""Prefill times that published rates imply: T(l) = S_kv(l) / Phi_kv(l)   (Eq. 1 of the paper)

The paper prints Phi_kv of six models (Table 3) without S_kv or T_prefill. S_kv follows from each
model's geometry with bf16 KV, so T is derived: as good as the geometry and as what the length
labels are taken to mean.
"""

from harness.architecture import Architecture
from harness.profile import PrefillPoint
from harness.published import Published

_BITS_PER_GBIT = 1e9


def derive_prefill(published: Published, architecture: Architecture) -> tuple[PrefillPoint, ...]:
    """A point for each length of Table 3. ScenarioError for a model that is not in it."""
    points = []
    for cell in published.phi_of(architecture.name):
        kv_bytes = architecture.kv_bytes(cell.tokens)
        rate = cell.phi_bytes_per_s * 8 / _BITS_PER_GBIT
        points.append(
            PrefillPoint(
                new_tokens=cell.tokens,
                cached_tokens=0,
                prefill_s=round(kv_bytes / cell.phi_bytes_per_s, 9),
                provenance="derived",
                source=(
                    f"{published.source} Table 3, {cell.printed_name} at {cell.printed_length}: "
                    f"S_kv / Phi_kv = {kv_bytes} B x 8 / {rate:g} Gbit/s, with S_kv of "
                    f"{cell.tokens} tokens from the geometry"
                ),
            )
        )
    return tuple(points)
