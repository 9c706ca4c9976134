"""The summary of a sweep: fronts against brute force, intervals against scipy, what is compared."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats
from sweep_files import cells_of, written

from harness.sweep.cells import Cell
from harness.sweep.console import short_names, sweep_table
from harness.sweep.execution import Outcome
from harness.sweep.pareto import demand, dominators
from harness.sweep.report import write_sweep_report
from harness.sweep.results import Row, cell_row
from harness.sweep.summary import sweep_summary

#: By deployment and seed; of a simulated cell those columns that the summary reads.
TEXT = """\
seeds = 3
deployments = ["prfaas_pd", "homogeneous_pd"]
[grid]
link.rtt = ["1ms", "2ms"]
workload.cv = [1, 2]
"""


def figures(ttft_s: float | None, cost: float | None = 10.0, **more: Any) -> dict[str, Any]:
    return {
        "ttft_mean_s": ttft_s,
        "ttft_p90_s": ttft_s,
        "throughput_req_per_s": 0.9,
        "carried_req_per_s": 1.0,
        "utilisation_link": 0.25,
        "utilisation_pd_decode": 0.5,
        "num_planned": 100,
        "num_failed": 0,
        "num_gpus": 8,
        "cost_unit": "USD",
        "cost_per_hour": cost,
        "notes": [],
        **more,
    }


def rows_of(cells: tuple[Cell, ...], by_cell: dict[int, dict[str, Any]]) -> dict[str, Row]:
    """Rows of the cells; ``by_cell`` changes figures by the place of the cell."""
    return {
        cell.cell_id: cell_row(
            cell, Outcome(cell.cell_id, "completed", None, figures(1.0) | by_cell.get(at, {}))
        )
        for at, cell in enumerate(cells)
    }


@pytest.fixture
def cells(tmp_path: Path) -> tuple[Cell, ...]:
    return cells_of(written(tmp_path, TEXT))


def beats(a: "np.ndarray[Any, Any]", b: "np.ndarray[Any, Any]") -> bool:
    return bool((a <= b).all() and (a < b).any())


@given(
    st.integers(1, 4).flatmap(
        lambda width: st.lists(
            st.lists(st.integers(0, 4).map(float), min_size=width, max_size=width),
            min_size=1,
            max_size=30,
        )
    )
)
def test_the_front_is_that_of_brute_force(table: list[list[float]]) -> None:
    objectives = np.array(table)
    found = dominators(objectives)
    for at, by in enumerate(found.tolist()):
        rivals = [one for one in objectives if beats(one, objectives[at])]
        assert (by < 0) == (not rivals)
        if by >= 0:
            assert beats(objectives[by], objectives[at])
            assert found[by] < 0


def test_means_and_intervals_are_those_of_scipy(cells: tuple[Cell, ...]) -> None:
    values = [1.0, 2.5, 2.0]
    changed = {at: {"ttft_p90_s": value} for at, value in enumerate(values)}
    point = sweep_summary(cells, rows_of(cells, changed))["points"][0]
    low, high = stats.t.interval(0.95, 2, loc=np.mean(values), scale=stats.sem(values))
    assert point["ttft_p90_s"]["mean"] == pytest.approx(np.mean(values), rel=1e-12)
    assert point["ttft_p90_s"]["low"] == pytest.approx(low, rel=1e-9)
    assert point["ttft_p90_s"]["high"] == pytest.approx(high, rel=1e-9)
    assert point["utilisation"]["mean"] == 0.5
    assert point["seeds"] == [1, 2, 3]


def test_points_of_one_demand_compete_and_the_dominated_name_who_beats_them(
    cells: tuple[Cell, ...],
) -> None:
    """Points in order: (rtt 1 ms, cv 1), (1, 2), (2, 1), (2, 2), each with both deployments."""
    worse = {at: {"ttft_p90_s": 2.0} for at in range(12, 18)}  # (2 ms, cv 1), both deployments
    cheap = {at: {"cost_per_hour": 5.0} for at in range(15, 18)}  # the second of them
    both = {at: worse[at] | cheap.get(at, {}) for at in worse}
    document = sweep_summary(cells, rows_of(cells, both))
    fronts = document["pareto"]["fronts"]
    assert [front["demand"] for front in fronts] == [{"workload.cv": 1}, {"workload.cv": 2}]
    assert fronts[0]["points"] == [0, 1, 5]
    assert fronts[0]["dominated"] == [4]
    assert fronts[1]["points"] == [2, 3, 6, 7]
    assert document["points"][4]["dominated_by"] in (0, 1, 5)
    assert document["points"][5]["on_front"]
    assert document["pareto"]["unit"] == "USD"
    assert demand({"load.rate_req_per_s": 1, "load.duration": 2, "link.rate": 3}) == {
        "load.duration": 2
    }


def test_where_prices_are_not_of_one_unit_gpus_stand_for_the_cost(cells: tuple[Cell, ...]) -> None:
    for unit, price in (("relative", 3.0), (None, None)):
        changed = {at: {"cost_unit": unit, "cost_per_hour": price} for at in range(3)}
        pareto = sweep_summary(cells, rows_of(cells, changed))["pareto"]
        assert (pareto["cost"], pareto["unit"]) == ("num_gpus", "GPUs")


def test_what_is_missing_or_overloaded_is_not_compared(
    cells: tuple[Cell, ...], tmp_path: Path
) -> None:
    rows = rows_of(cells, {0: {"ttft_p90_s": None}, 3: {"utilisation_link": 1.0}})
    rows[cells[6].cell_id] |= {"status": "failed", "reason": "no request arrives"}
    del rows[cells[9].cell_id]
    document = sweep_summary(cells, rows)
    assert [document[f"num_{key}"] for key in ("cells", "completed", "failed", "missing")] == [
        24, 22, 1, 1,
    ]  # fmt: skip
    points = document["points"]
    assert [point["on_front"] for point in points[:4]] == [None] * 4
    assert points[0]["not_compared"] == "it has no ttft_p90_s"
    assert "1 of 3 seeds" in points[0]["ttft_p90_s"]["reason"]
    assert points[0]["ttft_mean_s"]["mean"] == 1.0
    assert "overloaded" in points[1]["not_compared"]
    assert points[2]["num_completed"] == points[3]["num_completed"] == 2
    assert points[2]["carried_req_per_s"]["mean"] is None
    (failed,) = document["failed"]
    assert failed["reason"] == "no request arrives"
    assert failed["first"] == cells[6].label()
    shown = shown_table(document | {"sweep": "small"})
    assert "22 of 24 cells" in shown
    assert sum(line.rstrip().endswith(" !") for line in shown.splitlines()) == 4
    page = write_sweep_report(
        document | {"sweep": "small", "scenario": "x", "transfer": True}, tmp_path / "page.html"
    ).read_text()
    assert "no request arrives" in page
    assert "overloaded" in page
    assert "<svg" in page or "data:image/svg" in page


def shown_table(document: dict[str, Any]) -> str:
    console = Console(width=80)
    with console.capture() as caught:
        console.print(sweep_table(document))
    return caught.get()


def test_columns_are_named_by_the_last_step_where_it_is_not_ambiguous() -> None:
    assert short_names(["workload.cv", "deployments.a.num_decode", "deployments.b.num_decode"]) == [
        "cv",
        "deployments a num decode",
        "deployments b num decode",
    ]
