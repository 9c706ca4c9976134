"""tc-netem options: what is sent is what a kernel's dump of it decodes to."""

from hypothesis import example, given
from hypothesis import strategies as st

from netem.qdisc import Netem, decode, encode, options

netems = st.builds(
    Netem,
    limit_packets=st.integers(min_value=1, max_value=2**32 - 1),
    delay_ns=st.integers(min_value=0, max_value=274 * 10**9),
    jitter_ns=st.integers(min_value=0, max_value=274 * 10**9),
    loss=st.floats(min_value=0, max_value=1, allow_subnormal=False),
    rate_bytes_per_s=st.integers(min_value=0, max_value=2**63 - 1),
)


@given(netems)
@example(Netem(1000, 400_000, 50_000, 0.001, 12_500_000_000))  # 100 Gbit/s needs RATE64
def test_options_survive_the_wire(netem: Netem) -> None:
    sent = options()
    sent.setvalue(encode(netem))
    sent.encode()
    received = options(bytes(sent.data))
    received.decode()
    taken = decode(received)
    assert abs(taken.loss - netem.loss) <= 0.5 / (2**32 - 1)
    assert encode(taken) == encode(netem)
    assert (taken.delay_ns, taken.jitter_ns) == (netem.delay_ns, netem.jitter_ns)
    assert taken.rate_bytes_per_s == netem.rate_bytes_per_s
