"""tc-netem options as bytes: every attribute decodes to itself, and the bytes are the kernel's."""

import statistics
import struct
from array import array

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from netem_draws import netems

from netem.attributes import Netem, NetemSlot, decode, encode, told_by_a_dump
from netem.delay_tables import SCALE, delay_table
from netem.link import JitterDistribution, LinkError
from netem.loss import FourStateLoss, GilbertElliott, IndependentLoss
from netem.rtnetlink import attributes

EVERYTHING = Netem(
    limit_packets=25_000,
    rate_bytes_per_s=12_500_000_000,  # 100 Gbit/s needs RATE64
    packet_overhead_bytes=-14,
    delay_ns=5_000_000,
    jitter_ns=1_000_000,
    distribution="pareto",
    jitter_correlation=0.2,
    loss=IndependentLoss(0.2, 0.4),
    reorder=0.6,
    reorder_correlation=0.8,
    reorder_gap=5,
    duplicate=0.2,
    duplicate_correlation=0.4,
    corrupt=0.6,
    corrupt_correlation=0.8,
    ecn=True,
    slot=NetemSlot(1_000_000, 3_000_000, 4, 5),
    seed=2**64 - 1,
)
FIFTH = (2**32 - 1) // 5


@given(netems)
@example(EVERYTHING)
def test_every_attribute_decodes_to_itself(netem: Netem) -> None:
    assert decode(encode(netem)) == netem


@given(st.floats(min_value=0, max_value=1, allow_subnormal=False))
def test_a_chance_is_off_by_half_a_step_at_most(chance: float) -> None:
    netem = Netem(1000, duplicate=chance, loss=GilbertElliott(chance, chance, chance, chance))
    taken = decode(encode(netem))
    assert isinstance(taken.loss, GilbertElliott)
    read = (taken.duplicate, taken.loss.p, taken.loss.r, taken.loss.loss_bad, taken.loss.loss_good)
    assert max(abs(value - chance) for value in read) <= 0.5001 / (2**32 - 1)


def test_the_bytes_are_those_of_pkt_sched_h() -> None:
    """Written out by hand from struct tc_netem_qopt and TCA_NETEM_* of linux/pkt_sched.h."""
    data = encode(EVERYTHING)
    assert struct.unpack_from("=HH", data) == (len(data), 2)  # TCA_OPTIONS
    qopt = struct.unpack_from("=6I", data, 4)
    assert qopt == (5_000_000 // 64, 25_000, FIFTH, 5, FIFTH, 1_000_000 // 64)
    found = attributes(data[4 + 24 :])
    assert found == {
        1: struct.pack("=3I", FIFTH, 2 * FIFTH, 2 * FIFTH),  # CORR: delay, loss, duplicate
        2: delay_table("pareto"),
        3: struct.pack("=2I", 3 * FIFTH, 4 * FIFTH),  # REORDER
        4: struct.pack("=2I", 3 * FIFTH, 4 * FIFTH),  # CORRUPT
        6: struct.pack("=IiIi", 2**32 - 1, -14, 0, 0),  # RATE
        7: struct.pack("=I", 1),  # ECN
        8: struct.pack("=Q", 12_500_000_000),  # RATE64
        10: struct.pack("=q", 5_000_000),  # LATENCY64
        11: struct.pack("=q", 1_000_000),  # JITTER64
        12: struct.pack("=qqiiqq", 1_000_000, 3_000_000, 4, 5, 2_000_000, 1_000_000),  # SLOT
        13: delay_table("uniform"),  # SLOT_DIST
        14: struct.pack("=Q", 2**64 - 1),  # PRNG_SEED
    }


@pytest.mark.parametrize(
    ("loss", "kind", "words"),
    [
        (GilbertElliott(0.2, 0.4, 0.8, 0.2), 2, (FIFTH, 2 * FIFTH, FIFTH, FIFTH)),
        (FourStateLoss(0.2, 0.4, 0.6, 0.8, 0.2), 1,
         (FIFTH, 2 * FIFTH, 3 * FIFTH, FIFTH, 4 * FIFTH)),
    ],
)  # fmt: skip
def test_a_loss_chain_is_a_nested_attribute(
    loss: GilbertElliott | FourStateLoss, kind: int, words: tuple[int, ...]
) -> None:
    model = attributes(encode(Netem(1000, loss=loss))[4 + 24 :])[5]
    assert attributes(model) == {kind: struct.pack(f"={len(words)}I", *words)}


def test_what_is_off_is_sent_as_zeros_so_that_a_change_switches_it_off() -> None:
    found = attributes(encode(Netem(1000))[4 + 24 :])
    assert sorted(found) == [1, 2, 3, 4, 6, 7, 10, 11, 12]  # no LOSS: that resets by itself
    table = found.pop(2)
    assert table == delay_table("uniform")
    assert not any(b"".join(found.values()))


def test_jitter_without_a_rate_is_refused() -> None:
    with pytest.raises(LinkError, match="reorder packets"):
        Netem(1000, delay_ns=5_000_000, jitter_ns=1_000_000)


def test_a_dump_tells_neither_tables_nor_on_older_kernels_the_seed() -> None:
    told = told_by_a_dump(EVERYTHING)
    assert (told.distribution, told.seed) == (None, None)
    assert told.rate_bytes_per_s == EVERYTHING.rate_bytes_per_s


@pytest.mark.parametrize("distribution", ["normal", "pareto", "paretonormal"])
def test_tables_have_mean_0_and_deviation_1(distribution: JitterDistribution) -> None:
    table = array("h", delay_table(distribution))
    assert statistics.fmean(table) == pytest.approx(0, abs=0.001 * SCALE)
    assert statistics.pstdev(table) == pytest.approx(SCALE, rel=0.001)
    assert table.tolist() == sorted(table)


def test_tables_have_the_shape_of_their_law() -> None:
    normal, pareto, uniform, mixed = (
        [value / SCALE for value in array("h", delay_table(name))]
        for name in ("normal", "pareto", "uniform", "paretonormal")
    )
    # Of a normal law 68.3 % lie within one deviation, 95.4 % within two.
    assert sum(abs(x) < 1 for x in normal) / len(normal) == pytest.approx(0.683, abs=0.001)
    assert sum(abs(x) < 2 for x in normal) / len(normal) == pytest.approx(0.954, abs=0.001)
    # x = a (1 - q)^(-1/3) + b up to the cut: two quantiles give a and b, a third must agree.
    at = {q: pareto[round(q * len(pareto))] for q in (0.0, 0.875, 0.5)}
    scale, origin = at[0.875] - at[0.0], at[0.0]
    assert at[0.5] == pytest.approx(origin + scale * (2 ** (1 / 3) - 1), abs=0.002)
    assert (uniform[0], uniform[-1]) == pytest.approx((-1, 1), abs=0.001)
    assert pareto[0] > mixed[0] > normal[0]
