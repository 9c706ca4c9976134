"""The matrix of profiles: what a cell rests on, the better of two files, and what is missing."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.core import ScenarioError
from harness.profile_matrix import EXPECTED, Matrix, profile_matrix

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "profiles"


def cells(matrix: Matrix) -> dict[tuple[str, str], str]:
    return {(one.model, one.hardware): one.status for one in matrix.cells}


def test_the_shipped_profiles_lack_h20_but_for_stand_ins() -> None:
    matrix = profile_matrix(SHIPPED)
    found = cells(matrix)
    assert not matrix.skipped
    assert len(found) == len(matrix.models) * len(matrix.hardware)
    assert matrix.hardware[:2] == EXPECTED
    assert found["minimax-m2.5", "8xH200"] == "derived"
    assert found["mimo-v2-flash", "8xH20"] == "stand_in"
    known = {
        model for (model, kind), status in found.items() if kind == "8xH20" and status != "missing"
    }
    assert set(matrix.missing("8xH20")) == set(matrix.models) - known
    assert "minimax-m2.5" in matrix.missing("8xH20")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    shutil.copy(SHIPPED / "models/minimax-m2.5.json", tmp_path / "models")
    shutil.copy(SHIPPED / "minimax-m2.5-8xh200.json", tmp_path / "a.json")
    return tmp_path


def test_a_measured_file_is_better_and_one_other_point_makes_it_less(folder: Path) -> None:
    content = json.loads((folder / "a.json").read_text())
    content["engine"]["version"] = "0.5.23"
    for point in content["prefill"]["points"]:
        point["provenance"] = "measured"
    (folder / "b.json").write_text(json.dumps(content))
    cell = next(one for one in profile_matrix(folder).cells if one.hardware == "8xH200")
    assert (cell.status, cell.engine, cell.path) == ("measured", "sglang 0.5.23", "b.json")
    assert (cell.decode, cell.others) == (None, ("a.json",))
    content["prefill"]["points"][-1]["provenance"] = "stand_in"
    (folder / "b.json").write_text(json.dumps(content))
    cell = next(one for one in profile_matrix(folder).cells if one.hardware == "8xH200")
    assert (cell.status, cell.path, cell.others) == ("derived", "a.json", ("b.json",))


def test_what_cannot_be_read_is_named_and_other_models_have_a_row(folder: Path) -> None:
    (folder / "broken.json").write_text("{")
    content = json.loads((folder / "a.json").read_text())
    (folder / "other.json").write_text(json.dumps(content | {"model": "ours", "hardware": "2xL4"}))
    matrix = profile_matrix(folder)
    assert "broken.json" in matrix.skipped[0]
    assert matrix.models == ("minimax-m2.5", "ours")
    assert cells(matrix)["ours", "2xL4"] == "derived"
    with pytest.raises(ScenarioError, match="no folder of profiles"):
        profile_matrix(folder / "models")


def test_the_command_prints_it() -> None:
    words = [sys.executable, "-m", "harness", "profile", "matrix"]
    shown, document = (
        subprocess.run(
            [*words, *more], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT
        )
        for more in ([], ["--json"])
    )
    assert max(map(len, shown.stdout.splitlines()[:-2])) <= 80
    missing = json.loads(document.stdout)["missing"]["8xH20"]
    assert f"missing on 8xH20: {', '.join(missing)}" in shown.stdout
