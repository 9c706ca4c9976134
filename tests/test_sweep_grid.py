"""Sweep files: which cells they ask for, what each is called, and how a wrong one is refused."""

import itertools
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweep_files import CASE_STUDY, SIXTY_FOUR, cells_of, written

from harness.core import ScenarioError
from harness.scenario import load_scenario
from harness.sweep.file import ReadSweep, SweepFile
from harness.sweep.grid import override, points, setting_text

KEYS = ("load.rate_req_per_s", "workload.cv", "link.rtt", "slo.tpot")


def asked(**tables: Any) -> ReadSweep:
    return ReadSweep(Path("s.toml"), "", SweepFile.model_validate({"scenario": "x", **tables}))


def refusal(path: Path, *overrides: str) -> str:
    """One paragraph, of status 2, that names the file."""
    with pytest.raises(ScenarioError) as caught:
        cells_of(path, *overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message
    return message


@given(
    st.dictionaries(
        st.sampled_from(KEYS), st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=4
    ),
    st.integers(0, 3),
)
def test_points_are_rows_times_the_product_of_the_grid(
    grid: dict[str, list[int]], num_rows: int
) -> None:
    rows = [{"deployments.a.num_decode": n} for n in range(num_rows)]
    found = points(asked(grid=grid, list=rows))
    combinations = list(itertools.product(*grid.values()))
    expected = [
        {**row, **dict(zip(grid, values, strict=True))}
        for row in (rows or [{}])
        for values in combinations
    ]
    assert [point.settings for point in found] == expected
    assert [len(point.overrides) for point in found] == [len(one) for one in expected]


@given(
    st.recursive(
        st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False)
        | st.text(st.characters(exclude_categories=["Cs"])),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.text("ab .\"'é", min_size=1), inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_a_value_comes_back_from_its_setting_as_it_was(value: Any) -> None:
    key, _, text = override("a.b", value, "x").partition("=")
    assert key == "a.b"
    assert tomllib.loads(f"value = {text}")["value"] == value
    assert setting_text(value) is not None


def test_dotted_quoted_and_nested_keys_are_the_same_and_set_is_no_setting() -> None:
    nested = asked(set={"load": {"num_requests": 5}}, grid={"workload": {"cv": [1, 2]}})
    quoted = asked(set={"load.num_requests": 5}, grid={"workload.cv": [1, 2]})
    assert points(nested) == points(quoted)
    assert [point.settings for point in points(nested)] == [{"workload.cv": 1}, {"workload.cv": 2}]
    assert points(nested)[1].overrides == ("load.num_requests=5", "workload.cv=2")
    assert points(nested, ["load.num_requests=9"])[0].overrides[:2] == (
        "load.num_requests=5",
        "load.num_requests=9",
    )


def test_sixty_four_cells_of_the_case_study(tmp_path: Path) -> None:
    cells = cells_of(written(tmp_path))
    assert len(cells) == len({cell.cell_id for cell in cells}) == 64
    assert [cell.seed for cell in cells[:5]] == [1, 2, 3, 4, 1]
    assert [cell.deployment for cell in cells[:8]] == ["prfaas_pd"] * 4 + ["homogeneous_pd"] * 4
    last = cells[-1]
    assert last.scenario.load.rate_req_per_s == 1.8
    assert last.scenario.workload.cv == 2.0
    assert last.scenario.load.seed == last.seed == 4
    assert list(last.scenario.deployments) == ["homogeneous_pd"]
    assert all(cell.scenario.load.num_requests == 200 for cell in cells)


@pytest.mark.parametrize("name", ["sweep-case-study", "sweep-splits"])
def test_the_shipped_sweeps_resolve_to_sixty_four_cells(name: str) -> None:
    assert len(cells_of(CASE_STUDY.with_name(f"{name}.toml"))) == 64


def test_an_id_is_of_contents_and_of_its_own_deployment_alone(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    here = cells_of(written(tmp_path))
    ids = [cell.cell_id for cell in here]
    moved = written(tmp_path / "elsewhere", name="other.toml")
    assert [cell.cell_id for cell in cells_of(moved)] == ids
    # The same settings by another way.
    listed = SIXTY_FOUR.replace("seeds = 4", "seeds = [4, 2]").replace(
        "workload.cv = [1.0, 2.0]", ""
    )
    fewer = cells_of(written(tmp_path, listed + "[[list]]\nworkload.cv = 2\n", "fewer.toml"))
    assert {cell.cell_id for cell in fewer} < set(ids)
    assert len(fewer) == 16
    changed = cells_of(written(tmp_path), "deployments.prfaas_pd.threshold_tokens=20000")
    for cell, other in zip(here, changed, strict=True):
        assert (cell.cell_id == other.cell_id) == (cell.deployment == "homogeneous_pd")
    free = cells_of(written(tmp_path, "transfer = false\n" + SIXTY_FOUR, "free.toml"))
    assert not {cell.cell_id for cell in free} & set(ids)


def test_without_seeds_and_deployments_they_are_the_scenarios_own(tmp_path: Path) -> None:
    cells = cells_of(written(tmp_path, "[grid]\nworkload.cv = [1, 2]\n"))
    scenario = load_scenario(CASE_STUDY)
    assert [cell.deployment for cell in cells[:3]] == list(scenario.deployments)
    assert {cell.seed for cell in cells} == {scenario.load.seed}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sedes = 3", ["'sedes'", "'seeds'"]),
        ("seeds = 0", ["'seeds'", "1 to 1000"]),
        ("seeds = [1, 1]", ["'seeds'", "different"]),
        ("seeds = [true]", ["'seeds'"]),
        ('seeds = "4"', ["'seeds'"]),
        ("seeds = []", ["'seeds'"]),
        ('deployments = ["prfaas_dp"]', ["'prfaas_dp'", "'prfaas_pd'", "deployments"]),
        ('deployments = ["prfaas_pd", "prfaas_pd"]', ["same simulation", "prfaas_pd"]),
        ("max_cells = 5\nseeds = 6", ["'max_cells'", "is 5", "6 cells"]),
        ("max_cells = 5\nseeds = 2", ["'max_cells'", "6 cells"]),
        ("transfer = 1", ["'transfer'"]),
        ("[grid]\nworkload.cv = 2", ["'grid.workload.cv'", "list"]),
        ("[grid]\nworkload.cv = []", ["'grid.workload.cv'", "at least one"]),
        ("[grid]\nworkload.cvv = [1]", ["workload.cvv", "'cv'", "workload.cvv = 1", "cell"]),
        ("[grid]\nwrkload.cv = [1]", ["'wrkload'", "'workload'"]),
        ("[grid]\nworkload = {}", ["'grid.workload'", "empty"]),
        ("[grid]\nworkload.cv = [1, 1.0]", ["same simulation", "workload.cv = 1"]),
        ("[grid]\nworkload.cv = [1, -1]", ["workload.cv", "workload.cv = -1", "cell"]),
        ("[grid]\nlink.rtt = [1979-05-27]", ["'link.rtt'", "date"]),
        ("[grid]\nlink.rate = ['100gbit', 'fast']", ["link.rate", "link.rate = fast"]),
        ("[set]\nworkload.cv = 1\n[grid]\nworkload.cv = [1]", ["workload.cv", "grid", "set"]),
        ("[grid]\nworkload.cv = [1]\n[[list]]\nworkload.cv = 2", ["list", "grid"]),
        ("seeds = 2\n[grid]\nload.seed = [1]", ["'load.seed'", "seeds", "grid"]),
        ("[grid]\nlink.rtt = ['1ms']\n[[list]]\nlink = 3", ["'link'", "'link.rtt'"]),
        ("[[list]]\nworkload.cv = 1\n[[list]]", ["list[1]", "nothing"]),
        ('[grid]\n"workload.cv" = [1]\nworkload.cv = [2]', ["'grid.workload.cv'", "twice"]),
        (
            '[grid]\n" workload.cv " = [1]\n[set]\nworkload.cv = 3',
            ["'grid. workload.cv '", "no key"],
        ),
        ('[grid]\n"workload.cv=9 #" = [1]', ["'grid.workload.cv=9 #'", "no key"]),
        ('[set]\n"workload..cv" = 1', ["'set.workload..cv'", "no key"]),
        ('[[list]]\n"" = 1', ["'list[0].'", "no key"]),
        (f"[grid]\n{'a.' * 3000}b = [1]", ["'grid.a.a.", "32 deep"]),
        (f"transfer.{'a.' * 3000}b = 1", ["'transfer.a.a.", "32 deep"]),
        (f"[grid]\nworkload.cv = [{'[' * 40}{']' * 40}]", ["'grid.workload.cv'", "32 deep"]),
        ("[grid]\nworkload.cv = = 1", ["not TOML", "line 3"]),
    ],
)
def test_a_wrong_file_is_refused_where_it_is_wrong(
    tmp_path: Path, text: str, said: list[str]
) -> None:
    message = refusal(written(tmp_path, text))
    for words in said:
        assert words in message


def test_settings_of_the_command_line_are_checked_too(tmp_path: Path) -> None:
    path = written(tmp_path)
    message = refusal(path, "workload.cv=3")
    assert "--set" in message
    assert "grid" in message
    assert "--set" in refusal(path, " workload . cv =3")
    assert "load.num_requsts" in refusal(path, "load.num_requsts=3")
    with pytest.raises(ScenarioError, match="does not exist"):
        cells_of(tmp_path / "none.toml")
    lost = tmp_path / "lost.toml"
    lost.write_text('scenario = "nowhere.toml"')
    assert "nowhere.toml" in refusal(lost)
