"""What a real prefill hides of its transfer, as the benchmark measures it, in ratios of one run."""

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.mark.parametrize("name", ["full", "hybrid_3_1_chunked"])
def test_layers_leave_while_the_next_ones_compute(name: str) -> None:
    """A busy machine may stretch a run, not three of them."""
    from benchmarks.reference_overlap import CASES, measure

    found = []
    for _ in range(3):
        found.append(measure(CASES[name], tokens=4096, requests=3))
        # Without overlap this holds however long anything takes: the transfer follows the compute.
        assert found[-1]["whole_beyond"]["median"] >= 0.9, found
        if found[-1]["within_targets"]:
            return
    raise AssertionError(found)
