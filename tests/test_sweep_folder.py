"""The folder of a sweep: whose it is, and what of a damaged one is refused or run again."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from sweep_files import EIGHT, cells_of, kept, swept, written

from harness.cli import main
from harness.core import ScenarioError
from harness.sweep.results import PartWriter, SweepFolder


def test_lost_cells_and_those_of_a_broken_part_are_run_again(tmp_path: Path) -> None:
    path = written(tmp_path, EIGHT)
    cells = cells_of(path)
    folder = tmp_path / "out"
    swept(path, folder, 1)
    expected = kept(folder)
    with PartWriter(SweepFolder(folder)) as writer:
        writer.add({**expected[cells[0].cell_id], "status": "lost", "reason": "it died"})
    assert swept(path, folder, 1)["num_resumed"] == 7
    assert kept(folder) == expected
    parts = SweepFolder(folder).parts()
    assert len(parts) >= 3
    for part in parts:
        part.write_bytes(part.read_bytes()[:-100])
    parts[0].write_bytes(b"")
    rows, unread = SweepFolder(folder).read_rows()
    assert not rows
    assert list(unread) == parts
    said: list[str] = []
    assert swept(path, folder, 1, said.append)["num_resumed"] == 0
    assert kept(folder) == expected
    assert len(pd.read_parquet(folder / "cells")) == 8, "it can be read as one table"
    assert len(list((folder / "damaged").iterdir())) == len(parts)
    for part in parts:
        assert any(str(part) in sentence and "damaged" in sentence for sentence in said)


@pytest.mark.parametrize(
    "wrong",
    [{"num_planned": None}, {"status": "x"}, {"status": None}, {"ttft_p90_s": float("nan")}],
)
def test_a_part_with_a_row_that_no_sweep_writes_is_damaged(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    path, folder = written(tmp_path, EIGHT), tmp_path / "out"
    swept(path, folder, 1)
    expected = kept(folder)
    with PartWriter(SweepFolder(folder)) as writer:
        writer.add({**next(iter(expected.values())), **wrong})
    swept(path, folder, 1)
    assert kept(folder) == expected
    assert len(list((folder / "damaged").iterdir())) == 1


def test_a_folder_is_of_one_sweep_and_of_one_process_and_of_one_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, folder = written(tmp_path, EIGHT), tmp_path / "out"
    swept(path, folder)
    assert main(["sweep", str(path), "--out", str(folder)]) == 2
    assert "--resume" in capfd.readouterr().err
    assert main(["sweep", str(path), "--resume", str(tmp_path)]) == 2
    assert "no folder of a sweep" in capfd.readouterr().err
    assert main(["sweep", str(path), "--resume", str(folder), "--out", str(folder)]) == 2
    assert main(["sweep", str(path), "--ray", "auto", "--workers", "2"]) == 2
    capfd.readouterr()
    with SweepFolder(folder).alone(), pytest.raises(ScenarioError, match="Another process"):
        swept(path, folder)
    manifest = SweepFolder(folder).read_manifest()
    manifest["code"]["sources_sha256"] = "0" * 64
    SweepFolder(folder).write_manifest(manifest)
    with pytest.raises(ScenarioError, match="other code: sources_sha256"):
        swept(path, folder)
    (folder / "manifest.json").write_text("[]")
    with pytest.raises(ScenarioError, match="no manifest"):
        swept(path, folder)


def test_a_folder_that_is_not_empty_is_left_as_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, folder = written(tmp_path, EIGHT), tmp_path / "out"
    (folder / "cells").mkdir(parents=True)
    (folder / "cells" / "part-000000.parquet").write_bytes(b"old")
    (folder / "summary.json").write_text("mine")
    assert main(["sweep", str(path), "--out", str(folder)]) == 2
    assert f"{folder} is not empty" in capfd.readouterr().err
    assert (folder / "summary.json").read_text() == "mine"
    assert sorted(one.name for one in folder.iterdir()) == ["cells", "summary.json"]
    for flag in ("--out", "--resume"):
        with pytest.raises(SystemExit) as caught:
            main(["sweep", str(path), flag, ""])
        assert caught.value.code == 2
        assert "needs the name of a folder" in capfd.readouterr().err


@pytest.mark.parametrize(
    "change",
    [
        {"sweep": None},
        {"sweep": "x"},
        {"sweep": {"path": "x"}},
        {"code": [1]},
        {"code": {"python": 3}},
        {"sessions": [1]},
        {"sessions": None},
        {"schema_version": 2},
    ],
)
def test_a_damaged_manifest_is_refused(
    tmp_path: Path, change: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    path, folder = written(tmp_path, EIGHT), SweepFolder.create(tmp_path / "out")
    whole = {
        "schema_version": 1,
        "sweep": {"path": "x", "sha256": "0"},
        "code": {},
        "sessions": [],
    }
    folder.write_manifest(whole)
    assert folder.read_manifest() == whole
    folder.write_manifest(whole | change)
    assert main(["sweep", str(path), "--resume", str(folder.path)]) == 2
    err = capfd.readouterr().err
    assert f"{folder.manifest_path} is no manifest" in err
    assert "Traceback" not in err
    left = dict(whole)
    del left[next(iter(change))]
    folder.write_manifest(left)
    assert main(["sweep", str(path), "--resume", str(folder.path)]) == 2
    folder.manifest_path.write_bytes(b"{\xff")
    assert main(["sweep", str(path), "--resume", str(folder.path)]) == 2


def test_what_is_no_part_among_the_parts_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, folder = written(tmp_path, EIGHT), tmp_path / "out"
    swept(path, folder, 1)
    stray = folder / "cells" / "part-old.parquet"
    stray.write_bytes(SweepFolder(folder).parts()[0].read_bytes())
    assert main(["sweep", str(path), "--resume", str(folder)]) == 2
    assert f"{stray} is no part of this sweep" in capfd.readouterr().err
    stray.unlink()
    assert swept(path, folder, 1)["num_resumed"] == 8
