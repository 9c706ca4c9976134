"""Raw samples survive an interrupt, and samples of two engines are not mixed."""

from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from harness.core import ScenarioError
from harness.profiler.campaign import visit_means
from harness.profiler.plan import Cell
from harness.profiler.samples import SCHEMA, Sample, SampleFile

IDENTITY = {"engine": "sglang", "version": "0.5.9", "flags": {"page_size": 64, "tp_size": 8}}
CELL = Cell("prefill", 128)


def sample(visit: int, value_s: float, *, used: bool = True, session: int = 1) -> Sample:
    return Sample(
        "prefill", 128, 0, 0, 0, session, visit, used, None if used else "warm_up", value_s,
        outside_s=value_s + 0.01, inside_s=value_s, parts_s={"queue": 0.004, "http": 0.006},
        prompt_tokens=128, told_cached_tokens=0, steps_s=(0.1, 0.2), unix_s=1e9, mono_ns=visit,
    )  # fmt: skip


def test_samples_come_back_from_the_table_and_from_a_spool(tmp_path: Path) -> None:
    first = SampleFile(tmp_path / "a", IDENTITY)
    first.add(sample(0, 1.0))
    first.add(sample(1, 2.0, used=False))
    first.compact()
    assert not first.spool_path.exists()
    first.add(sample(2, 3.0))  # and then it is killed
    second = SampleFile(tmp_path / "a", IDENTITY)
    second.load()
    assert second.samples == first.samples
    assert not second.spool_path.exists()
    table = pq.read_table(second.table_path)
    assert table.schema.equals(SCHEMA)
    assert table.num_rows == 3


def test_a_kill_between_table_and_spool_counts_no_row_twice(tmp_path: Path) -> None:
    file = SampleFile(tmp_path / "a", IDENTITY)
    file.add(sample(0, 1.0))
    spool = file.spool_path.read_bytes()
    file.compact()
    file.spool_path.write_bytes(spool)
    again = SampleFile(tmp_path / "a", IDENTITY)
    again.load()
    assert again.samples == [sample(0, 1.0)]


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    file = SampleFile(tmp_path / "a", IDENTITY)
    file.add(sample(0, 1.0))
    whole = file.spool_path.read_bytes()
    file.spool_path.write_bytes(whole + whole.splitlines()[-1][:40])
    again = SampleFile(tmp_path / "a", IDENTITY)
    again.load()
    assert again.samples == [sample(0, 1.0)]


@pytest.mark.parametrize("compacted", [True, False])
def test_another_engine_is_refused_and_named(tmp_path: Path, compacted: bool) -> None:
    file = SampleFile(tmp_path / "a", IDENTITY)
    file.add(sample(0, 1.0))
    if compacted:
        file.compact()
    other = SampleFile(tmp_path / "a", IDENTITY | {"flags": {"page_size": 1, "tp_size": 8}})
    with pytest.raises(ScenarioError, match=r"flags\.page_size was 64 and is 1"):
        other.load()
    newer = SampleFile(tmp_path / "a", IDENTITY | {"version": "0.5.23"})
    with pytest.raises(ScenarioError, match=r"version was '0\.5\.9' and is '0\.5\.23'"):
        newer.load()


def test_what_is_no_table_of_samples_is_refused(tmp_path: Path) -> None:
    file = SampleFile(tmp_path / "a", IDENTITY)
    file.table_path.write_bytes(b"PAR1 no")
    with pytest.raises(ScenarioError, match="cannot read"):
        file.load()
    file.table_path.unlink()
    file.spool_path.write_bytes(b"{}\n")
    with pytest.raises(ScenarioError, match="no spool of profile samples"):
        file.load()


def test_a_visit_is_one_sample_and_what_was_not_used_is_none() -> None:
    rows = [
        sample(0, 9.0, used=False),
        sample(0, 1.0),
        sample(0, 2.0),
        sample(1, 4.0),
        sample(0, 8.0, session=2),
        replace(sample(1, 5.0, used=False), new_tokens=256),
    ]
    assert visit_means(rows, [CELL, Cell("prefill", 256)]) == {
        CELL: [1.5, 4.0, 8.0],
        Cell("prefill", 256): [],
    }
