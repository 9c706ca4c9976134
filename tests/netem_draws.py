"""Hypothesis strategies for tc-netem qdiscs: every attribute, on the grid the wire can tell."""

from hypothesis import strategies as st

from netem.attributes import U32_MAX, Netem, NetemSlot
from netem.loss import FourStateLoss, GilbertElliott, IndependentLoss

counts = st.integers(min_value=1, max_value=U32_MAX)
chances = st.integers(min_value=0, max_value=U32_MAX).map(lambda scaled: scaled / U32_MAX)
some_chance = counts.map(lambda scaled: scaled / U32_MAX)
#: What the kernel takes for a jitter: a C int of nanoseconds.
jitters_ns = st.integers(min_value=0, max_value=2**31 - 1)
delays_ns = st.integers(min_value=0, max_value=274 * 10**9)
rates = st.one_of(
    st.integers(min_value=1, max_value=2**63 - 1),
    st.integers(min_value=U32_MAX - 2, max_value=U32_MAX + 2),
)
losses = st.one_of(
    st.none(),
    st.builds(IndependentLoss, some_chance, chances),
    st.builds(GilbertElliott, chances, chances, chances, chances),
    st.builds(FourStateLoss, chances, chances, chances, chances, chances),
)
slots = st.tuples(delays_ns, st.integers(min_value=1, max_value=10**9)).flatmap(
    lambda ends: st.builds(
        NetemSlot,
        min_delay_ns=st.just(ends[0]),
        max_delay_ns=st.just(ends[0] + ends[1]),
        packets=st.integers(min_value=0, max_value=2**31 - 2),
        bytes=st.integers(min_value=0, max_value=2**31 - 2),
    )
)
reorders = st.one_of(
    st.fixed_dictionaries({}),
    st.fixed_dictionaries(
        {"reorder": some_chance, "reorder_correlation": chances, "reorder_gap": counts}
    ),
)
netems = st.builds(
    lambda reorder, **rest: Netem(**reorder, **rest),
    reorder=reorders,
    limit_packets=counts,
    rate_bytes_per_s=rates,
    packet_overhead_bytes=st.integers(min_value=-(2**31), max_value=2**31 - 1),
    delay_ns=delays_ns,
    jitter_ns=jitters_ns,
    distribution=st.sampled_from(["uniform", "normal", "pareto", "paretonormal"]),
    jitter_correlation=chances,
    loss=losses,
    duplicate=chances,
    duplicate_correlation=chances,
    corrupt=chances,
    corrupt_correlation=chances,
    ecn=st.booleans(),
    slot=st.one_of(st.none(), slots),
    seed=st.one_of(st.none(), st.integers(min_value=0, max_value=2**64 - 1)),
)
