"""Offsets between clocks, against clocks whose offset is known; and who is let in."""

from hypothesis import given
from hypothesis import strategies as st

from harness.load.admission import new_nonce, proof, proves
from harness.load.clocks import Offset, clock_identity, drift_fault, offset_of

NS = st.integers(0, 10**9)


@given(st.integers(-(10**18), 10**18), st.lists(st.tuples(NS, NS, NS), min_size=1, max_size=40))
def test_the_truth_lies_within_the_bound(offset_ns: int, ways: list[tuple[int, int, int]]) -> None:
    """Whatever the way there and back takes, and however it is shared."""
    trips = [
        (sent_ns, sent_ns + there_ns + offset_ns, sent_ns + there_ns + back_ns)
        for sent_ns, there_ns, back_ns in ways
    ]
    found = offset_of(trips)
    assert abs(found.offset_ns - offset_ns) <= found.bound_ns
    assert found.bound_ns == min(-(-(there + back) // 2) for _, there, back in ways)


def test_a_drift_is_more_than_the_bounds_explain() -> None:
    before = Offset(1_000_000_000, 100_000)
    assert drift_fault(before, Offset(1_000_150_000, 100_000)) is None
    assert drift_fault(before, Offset(1_000_900_000, 100_000)) is None
    fault = drift_fault(before, Offset(1_004_000_000, 100_000))
    assert fault == "its clock moved 4.00 ms against the master's during the run, bound 1 ms"
    assert drift_fault(before, Offset(1_004_000_000, 5_000_000)) is None


def test_processes_of_one_host_have_one_clock() -> None:
    assert clock_identity() == clock_identity()


def test_a_proof_is_of_one_token_side_challenge_and_name() -> None:
    master, worker = new_nonce(), new_nonce()
    shown = proof("token", "worker", master, worker, "w1")
    assert proves(shown, "token", "worker", master, worker, "w1")
    assert not proves(shown, "other", "worker", master, worker, "w1")
    assert not proves(shown, "token", "master", master, worker, "w1")
    assert not proves(shown, "token", "worker", new_nonce(), worker, "w1")
    assert not proves(shown, "token", "worker", master, new_nonce(), "w1")
    assert not proves(shown, "token", "worker", master, worker, "w2")
    for nothing in (None, "", b"", shown.hex(), 5):
        assert not proves(nothing, "token", "worker", master, worker, "w1")
