"""The profiler on a live worker of known costs and noise; 100 repetitions are a benchmark."""

import asyncio

import pytest

from benchmarks.profiler_coverage import CELLS, measured


@pytest.mark.quiet
@pytest.mark.slow
def test_a_live_worker_with_noise_is_read_back() -> None:
    """Intervals of 3 % end with the pilot's visits, whatever the machine adds to a step."""
    rows = asyncio.run(measured(4, noise_cv=0.02, bound=0.03, pairs=4, seed=2))
    assert len(rows) == len(CELLS)
    for row in rows:
        assert row["visits_median"] >= 12, row
        assert abs(row["mean_error"]) < 0.03, row


def test_prefill_is_read_back_from_inside_on_any_machine() -> None:
    """What the worker says it computed for does not depend on who else uses the machine."""
    cells = tuple(cell for cell in CELLS if cell.kind == "prefill")
    rows = asyncio.run(measured(6, noise_cv=0.02, bound=0.05, pairs=6, seed=3, cells=cells))
    for row in rows:
        assert row["largest_error"] < 0.03, row  # 12 visits of two: 7 standard deviations
        assert row["covered"] >= 3, row  # one in 11,000 has fewer, at a true 95 %
