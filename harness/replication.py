"""What crosses between engines whose attention is split over ranks: copies of a layer's bytes.

An instance of ``tp`` ranks has attention TP a = tp / dp, with dp data-parallel attention groups of
which a request uses one. Of a layer every rank holds

    mla                  all of it, since one latent serves all heads
    gqa, sliding_window  max(1, heads / a) of its KV heads: replicated where there are more ranks
    kda, gdn, mamba2,    heads / a of its heads: never replicated
    lightning

and in SGLang every decode rank fetches what it holds from its prefill ranks by itself, so that of a
layer there cross, with a_p ranks at the prefill and a_d at the decode side,

    mla                  a_d copies
    gqa, sliding_window  max(1, max(a_p, a_d) / heads) copies
    recurrent state      1 copy, in slices

The mapping of ranks is that of SGLang 0.5.9 (``CommonKVReceiver.__init__``) and 0.5.23
(``CommonKVManager._resolve_rank_mapping``) in ``srt/disaggregation/common/conn.py``. Equal sizes
pair rank by rank; a larger decode side fetches from rank r // (a_d / a_p); a larger prefill side
sends from all ranks of a group, but for the latent, which its first one sends. ``faults`` says
where a version has no such path. Bytes are counted exactly, in fractions of a layer.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from harness.architecture import Architecture, paged_kv_bytes
from harness.attention import Attention, Layer, Lightning, Linear, Mla


@dataclass(frozen=True, slots=True)
class Sharding:
    """How an instance splits attention: ``tp`` ranks in ``dp`` groups, ``attention_tp`` in each."""

    tp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        if self.tp < 1 or self.dp < 1 or self.tp % self.dp:
            raise ValueError(f"{self.tp} ranks cannot form {self.dp} groups of one size")

    @property
    def attention_tp(self) -> int:
        return self.tp // self.dp


@dataclass(frozen=True, slots=True)
class Send:
    """Of one layer and request: which rank of a group sends which heads to which. None: the whole
    latent."""

    prefill_rank: int
    decode_rank: int
    heads: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Replication:
    """S_kv of ``tokens`` tokens by geometry and as it crosses; ``copies`` of each kind of layer."""

    tokens: int
    geometry_bytes: int
    wire_bytes: int
    copies: dict[str, Fraction]

    @property
    def factor(self) -> float:
        return self.wire_bytes / self.geometry_bytes


def sends(attention: Attention, prefill: Sharding, decode: Sharding) -> tuple[Send, ...]:
    """Who sends what of a layer. ValueError where ranks and heads do not divide."""
    heads = _heads(attention)
    from_ranks, to_ranks = prefill.attention_tp, decode.attention_tp
    copies(attention, prefill, decode)  # refuses what does not divide
    found = []
    for source, target in _pairs(from_ranks, to_ranks, whole=heads is None):
        sent = None
        if heads is not None:
            there = _held(heads, to_ranks, target)
            sent = tuple(one for one in _held(heads, from_ranks, source) if one in there)
        found.append(Send(source, target, sent))
    return tuple(found)


def copies(attention: Attention, prefill: Sharding, decode: Sharding) -> Fraction:
    """How often a layer's bytes cross: the sum over ``sends``, in closed form."""
    sides = prefill.attention_tp, decode.attention_tp
    if max(sides) % min(sides):
        raise ValueError(f"attention TP of {sides[0]} and {sides[1]}: neither divides the other")
    heads = _heads(attention)
    if heads is None:
        return Fraction(decode.attention_tp)
    for side in sides:
        _check_heads(attention, heads, side)
    return max(Fraction(1), Fraction(max(sides), heads))


def replicated(
    architecture: Architecture,
    tokens: int,
    prefill: Sharding,
    decode: Sharding,
    page_tokens: int = 1,
    resident_tokens: int = 0,
) -> Replication:
    """One request's KV as it crosses, in whole pages; what a run's byte gate compares with.

    ``resident_tokens``, whole pages, lie at the destination already. ValueError where ranks and
    heads do not divide, or a kind of layer is given by its bytes alone, whose heads nobody knows.
    """
    one_rank = prefill.attention_tp == decode.attention_tp == 1
    by_kind = {
        layer.kind: Fraction(1)
        if one_rank
        else copies(_attention(architecture, layer), prefill, decode)
        for layer in architecture.kind_counts
    }
    wire, geometry = Fraction(0), 0
    for layer, count in architecture.kind_counts.items():
        size = count * _paged(layer, tokens, page_tokens, resident_tokens)
        geometry += size
        wire += size * by_kind[layer.kind]
    return Replication(tokens, geometry, int(wire), by_kind)


def counted_bytes(
    architecture: Architecture,
    tokens: int,
    prefill: Sharding,
    decode: Sharding,
    page_tokens: int = 1,
) -> int:
    """What ``kv_transfer_total_mb`` of a prefill server adds for a request, in bytes.

    By default only rank 0 of each attention group keeps metrics (SGLang 0.5.23,
    ``SchedulerMetricsCollectorContext``; ``--enable-metrics-for-all-schedulers`` for all of them).
    It counts what that rank holds of the pages it sent, times a_d / a_p for a model that is all MLA
    (``get_transfer_metric``): less than what crosses, unless tp is 1 on both sides.
    """
    sides = prefill.attention_tp, decode.attention_tp
    if sides == (1, 1):
        return paged_kv_bytes(architecture, tokens, page_tokens)
    only_mla = all(isinstance(one, Mla) for one in architecture.attention.values())
    destinations = max(1, sides[1] // sides[0]) if only_mla else 1
    total = Fraction(0)
    for layer, count in architecture.kind_counts.items():
        heads = _heads(_attention(architecture, layer))
        held = Fraction(1) if heads is None else Fraction(max(1, heads // sides[0]), heads)
        total += count * _paged(layer, tokens, page_tokens, 0) * held * destinations
    return int(total)


def faults(
    architecture: Architecture, prefill: Sharding, decode: Sharding, version: str | None
) -> Iterator[str]:
    """Why a version has no path between the two; nothing is said of versions that are unknown."""
    sides = prefill.attention_tp, decode.attention_tp
    shapes = architecture.attention.values()
    for shape in shapes:
        try:
            copies(shape, prefill, decode)
        except ValueError as error:
            yield f"{shape.attention}: {error}"
    if sides[0] == sides[1] or version != "0.5.9":
        return
    unequal = f"with attention TP {sides[0]} at prefill and {sides[1]} at decode"
    if any(shape.attention == "sliding_window" for shape in shapes):
        yield f"SGLang 0.5.9 refuses to send a sliding window {unequal}"
    if len({isinstance(shape, Mla) for shape in shapes}) > 1:
        yield (
            f"SGLang 0.5.9 takes the latent of a hybrid for heads and slices it {unequal}; give "
            "both the same"
        )
    if any(isinstance(shape, Linear) for shape in shapes):
        yield (
            "SGLang 0.5.9 slices the convolution's inputs as one block, though each rank holds its "
            f"part of q, k and v, {unequal}"
        )
    for shape in shapes:
        heads = _heads(shape)
        if shape.attention == "gqa" and heads is not None and max(sides) > heads:
            yield f"SGLang 0.5.9 has no path for {heads} KV heads {unequal}: ranks share a head"


def _paged(layer: Layer, tokens: int, page_tokens: int, resident_tokens: int) -> int:
    """As ``paged_kv_bytes``, of one layer."""
    end = -(-tokens // page_tokens) - resident_tokens // page_tokens
    start = max(0, tokens - layer.window_tokens) // page_tokens
    window = -(-tokens // page_tokens) - start if layer.window_bytes_per_token else 0
    return (
        layer.growing_bytes_per_token * end * page_tokens
        + layer.window_bytes_per_token * window * page_tokens
        + layer.fixed_bytes
    )


def _attention(architecture: Architecture, layer: Layer) -> Attention:
    shape = architecture.attention.get(layer.kind)
    if shape is None:
        raise ValueError(f"{layer.kind} is given by its bytes, so how ranks share it is not known")
    return shape


def _heads(attention: Attention) -> int | None:
    """What ranks divide among themselves; None: nothing, every rank holds all."""
    if isinstance(attention, Mla):
        return None
    return attention.heads if isinstance(attention, Linear | Lightning) else attention.kv_heads


def _check_heads(attention: Attention, heads: int, ranks: int) -> None:
    """KV heads may be fewer than the ranks, heads of a recurrent state not."""
    if heads % ranks and (ranks % heads or isinstance(attention, Linear | Lightning)):
        raise ValueError(f"{ranks} ranks cannot share {heads} heads evenly")


def _pairs(prefill: int, decode: int, *, whole: bool) -> Iterator[tuple[int, int]]:
    """Which rank sends to which, of one attention group each."""
    for target in range(decode):
        if decode >= prefill:
            yield target // (decode // prefill), target
            continue
        group = prefill // decode
        # One copy of the latent is enough; of heads each rank of the group has its own.
        sources = range(target * group, target * group + (1 if whole else group))
        yield from ((source, target) for source in sources)


def _held(heads: int, ranks: int, rank: int) -> tuple[int, ...]:
    """Heads of one rank; of fewer heads than ranks, one that its neighbours hold too."""
    if ranks > heads:
        return (rank // (ranks // heads),)
    each = heads // ranks
    return tuple(range(rank * each, (rank + 1) * each))
