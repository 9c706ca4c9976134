"""Paths whose rate changes, against a server that moves byte by byte through the same rates."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.architecture import Architecture
from harness.attention import Layer
from harness.kv_path import KvPath, LayerSizes, RateChange, ready_times

RATE = 100.0
CHANGES = st.lists(
    st.tuples(st.floats(0.05, 10), st.sampled_from([0.0, 10.0, 50.0, 100.0, 400.0])), max_size=6
).map(lambda rows: ascending(rows))
#: (start_s, prefill_s, tokens) of each prefill; bytes a token and beside them of each layer.
SENDINGS = st.lists(
    st.tuples(st.floats(0, 20), st.floats(0.01, 5), st.integers(1, 30)), min_size=1, max_size=8
)
LAYERS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 150)), min_size=1, max_size=6)


def sizes_of(kinds: list[tuple[int, int]]) -> LayerSizes:
    layers = tuple(Layer(f"k{n}", g, fixed_bytes=f) for n, (g, f) in enumerate(kinds))
    return LayerSizes(Architecture("test", Path("test.json"), layers, {}))


def ascending(rows: list[tuple[float, float]]) -> tuple[RateChange, ...]:
    """Changes after these gaps; in the end the path carries something."""
    at_s, changes = 0.0, []
    for gap_s, rate in rows:
        at_s += gap_s
        changes.append(RateChange(at_s, rate))
    return (*changes, RateChange(at_s + 1.0, 50.0))


def served(ready_s: float, size: float, changes: tuple[RateChange, ...]) -> float:
    """When a piece that is ready, and alone, has left: stretch by stretch."""
    at_s, left = ready_s, size
    edges = [0.0, *(one.at_s for one in changes), math.inf]
    rates = [RATE, *(one.rate_bytes_per_s for one in changes)]
    for rate, (_, until_s) in zip(rates, pairwise(edges), strict=True):
        if until_s <= at_s or left <= 0:
            continue
        if rate * (until_s - at_s) >= left:
            return at_s + left / rate
        left -= rate * (until_s - at_s)
        at_s = until_s
    return at_s


@given(CHANGES, SENDINGS, LAYERS)
def test_layers_leave_as_from_a_server_that_follows_the_rates(
    changes: tuple[RateChange, ...],
    drawn: list[tuple[float, float, int]],
    kinds: list[tuple[int, int]],
) -> None:
    model = sizes_of(kinds)
    path = KvPath(RATE, 0.25, changes, model)
    begun = sorted(drawn, key=lambda row: row[0])
    layers, events = [], []
    for key, (start_s, prefill_s, tokens) in enumerate(begun):
        sizes = model(tokens)
        ready = ready_times(start_s, start_s + prefill_s, len(sizes), layerwise=True)
        layers += [(float(r), key, size) for r, size in zip(ready, sizes, strict=True)]
        events += [(start_s, 0, key), (start_s + prefill_s, 1, key)]
    landed: dict[int, float] = {}
    for when_s, ends, key in sorted(events):
        start_s, prefill_s, tokens = begun[key]
        if ends:
            landed[key] = path.landed_s(key, when_s)
        else:
            path.offer(key, start_s, start_s + prefill_s, tokens)
    free_s, expected = 0.0, {}
    for ready_s, key, size in sorted(layers, key=lambda layer: layer[:2]):
        free_s = served(max(free_s, ready_s), size, changes)
        expected[key] = free_s + 0.25
    # Rounding may put a departure at the end of an outage or at its beginning: nothing is carried
    # between the two.
    for key, expected_s in expected.items():
        low_s, high_s = sorted((expected_s - 0.25, landed[key] - 0.25))
        if high_s > low_s:
            assert path.mean_rate_bytes_per_s(low_s, high_s) * (high_s - low_s) < 1e-6


@given(CHANGES, SENDINGS, LAYERS, st.lists(st.floats(0, 40), min_size=1, max_size=10))
def test_what_was_carried_and_what_waits_are_what_is_ready_and_asking_changes_nothing(
    changes: tuple[RateChange, ...],
    drawn: list[tuple[float, float, int]],
    kinds: list[tuple[int, int]],
    looks: list[float],
) -> None:
    def run(asked: list[float]) -> tuple[list[float], list[tuple[float, float, float]]]:
        model = sizes_of(kinds)
        path = KvPath(RATE, 0.0, changes, model)
        begun = sorted(drawn, key=lambda row: row[0])
        events: list[tuple[float, int, int]] = [(at_s, 2, 0) for at_s in asked]
        for key, (start_s, prefill_s, _) in enumerate(begun):
            events += [(start_s, 0, key), (start_s + prefill_s, 1, key)]
        landed: list[float] = []
        seen: list[tuple[float, float, float]] = []
        offered = []
        for when_s, kind, key in sorted(events):
            start_s, prefill_s, tokens = begun[key]
            sizes = model(tokens)
            ready = ready_times(start_s, start_s + prefill_s, len(sizes), layerwise=True)
            if kind == 0:
                path.offer(key, start_s, start_s + prefill_s, tokens)
                offered.append((ready, sizes))
            elif kind == 1:
                landed.append(path.landed_s(key, when_s))
            else:
                ready_bytes = sum(
                    size
                    for ready, sizes in offered
                    for at_s, size in zip(ready, sizes, strict=True)
                    if at_s <= when_s
                )
                carried = path.carried(when_s)
                seen.append((carried.acked_bytes, carried.waiting_bytes, ready_bytes))
        return landed, seen

    landed, seen = run(looks)
    assert landed == pytest.approx(run([])[0], abs=1e-9)
    for acked, waiting, ready in seen:
        assert acked + waiting == pytest.approx(ready, abs=1e-6)
        assert waiting >= 0
    assert all(b[0] >= a[0] - 1e-6 for a, b in pairwise(seen))


def test_a_cut_an_outage_and_an_end_without_rate() -> None:
    path = KvPath(RATE, 0.5, [RateChange(1.0, 50.0), RateChange(3.0, 0.0), RateChange(5.0, 100.0)])
    assert path.send(0.0, 200) == pytest.approx(1.0 + 2.0 + 0.5)  # 100 at 100, 100 at 50
    assert path.send(3.5, 100) == pytest.approx(6.0 + 0.5)
    assert [path.open_s(at_s) for at_s in (2.0, 3.0, 4.9)] == [2.0, 5.0, 5.0]
    assert path.mean_rate_bytes_per_s(0.0, 5.0) == pytest.approx(200 / 5)
    dead = KvPath(RATE, 0.5, [RateChange(1.0, 0.0)])
    assert dead.send(0.0, 50) == pytest.approx(1.0)
    assert dead.send(0.9, 100) == math.inf
    assert dead.open_s(2.0) == math.inf
    assert dead.next_change_s(1.0) == math.inf
