"""A schedule in columns: what goes in comes out, split among workers or sent to one."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.core import Request, ScenarioError
from harness.load.schedule import Shard, read_schedule, shard_of, write_schedule

SCHEDULES = st.lists(
    st.builds(
        Request,
        rid=st.text(min_size=1, max_size=9),
        index=st.integers(0, 2**53),
        planned_s=st.floats(0, 1e6),
        input_tokens=st.integers(1, 1_000_000),
        output_tokens=st.integers(1, 1_000_000),
        hash_ids=st.lists(st.integers(0, 2**63 - 1), max_size=5).map(tuple),
        cached_tokens=st.integers(0, 1_000_000),
    ),
    min_size=1,
    max_size=30,
    unique_by=(lambda one: one.rid, lambda one: one.index),
).map(lambda requests: tuple(sorted(requests, key=lambda one: one.planned_s)))


@given(SCHEDULES)
def test_columns_hold_what_was_put_in(requests: tuple[Request, ...]) -> None:
    shard = shard_of(requests)
    assert len(shard) == len(requests)
    assert tuple(shard) == requests
    assert shard[-1] == requests[-1]
    assert tuple(Shard.from_bytes(shard.to_bytes())) == requests
    assert tuple(shard[1:]) == requests[1:]
    with pytest.raises(IndexError):
        shard[len(requests)]


@given(SCHEDULES, st.integers(1, 6))
def test_parts_together_are_the_schedule(requests: tuple[Request, ...], workers: int) -> None:
    shard = shard_of(requests)
    parts = [shard.part(worker, workers) for worker in range(workers)]
    for worker, part in enumerate(parts):
        assert tuple(part) == tuple(one for one in requests if one.index % workers == worker)
        assert tuple(Shard.from_bytes(part.to_bytes())) == tuple(part)
    together = [one for part in parts for one in part]
    assert sorted(together, key=lambda one: one.index) == sorted(
        requests, key=lambda one: one.index
    )


@settings(max_examples=20)
@given(SCHEDULES)
def test_a_file_is_read_back(requests: tuple[Request, ...]) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        write_schedule(requests, Path(folder) / "s")
        assert tuple(read_schedule(Path(folder) / "s")) == requests


def test_a_long_file_is_read_in_pieces(tmp_path: Path) -> None:
    count = 2 * 65_536 + 7
    requests = tuple(Request(f"{i:06d}", i, i / 8, 1 + i % 9, 1, (i,)) for i in range(count))
    write_schedule(requests, tmp_path / "s")
    shard = read_schedule(tmp_path / "s")
    assert len(shard) == count
    for at in (0, 65_535, 65_536, count - 1):
        assert shard[at] == requests[at]
    assert int(shard.hash_ids.sum()) == sum(range(count))


def test_a_name_that_comes_again_far_below_is_refused(tmp_path: Path) -> None:
    requests = [Request(f"{i}", i, 0.0, 1, 1) for i in range(70_000)]
    requests.append(Request("5", 70_000, 0.0, 1, 1))
    write_schedule(requests, tmp_path / "s")
    with pytest.raises(ScenarioError, match="s:70001: rid '5' or index 70000 occurs twice"):
        read_schedule(tmp_path / "s")
