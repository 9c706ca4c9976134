"""The path of KV against a server that takes one piece after another, however it is looked at."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_path_reference import departures

from harness.architecture import Architecture
from harness.attention import Layer
from harness.kv_path import KvPath, LayerSizes, ready_times

#: (start_s, prefill_s, tokens, resident tokens) of each prefill.
Prefill = tuple[float, float, int, int]
PREFILLS = st.lists(
    st.tuples(st.floats(0, 50), st.floats(0.5, 10), st.integers(1, 400), st.integers(0, 300)),
    min_size=1,
    max_size=40,
)


def sizes_of(kinds: list[tuple[int, int, int]]) -> LayerSizes:
    """Layers of (growing, fixed, window) bytes; windows of 64 tokens."""
    layers = tuple(
        Layer(f"k{n}", growing, 64 if window else 0, window, fixed)
        for n, (growing, fixed, window) in enumerate(kinds)
    )
    return LayerSizes(Architecture("test", Path("test.json"), layers, {}, {}))


def landings(
    path: KvPath, prefills: list[Prefill], looks: list[float]
) -> tuple[dict[int, float], list[float]]:
    """When each prefill's KV lands, and what waits at each look."""
    events = [(at_s, 2, n) for n, at_s in enumerate(looks)]
    for key, (start_s, prefill_s, _, _) in enumerate(prefills):
        events += [(start_s, 0, key), (start_s + prefill_s, 1, key)]
    landed: dict[int, float] = {}
    waiting: list[float] = []
    for when_s, kind, key in sorted(events):
        if kind == 0:
            start_s, prefill_s, tokens, resident = prefills[key]
            path.offer(key, start_s, start_s + prefill_s, tokens, resident)
        elif kind == 1:
            landed[key] = path.landed_s(key, when_s)
        else:
            waiting.append(path.carried(when_s).waiting_bytes)
    return landed, waiting


@settings(max_examples=200)
@given(
    PREFILLS,
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 300), st.sampled_from([0, 0, 7])),
        min_size=1,
        max_size=9,
    ),
    st.sampled_from([50.0, 1e3, 1e4, 1e5]),
    st.booleans(),
    st.lists(st.floats(0, 80), max_size=8),
)
def test_it_is_one_queue_of_layers(
    drawn: list[Prefill],
    kinds: list[tuple[int, int, int]],
    rate: float,
    layerwise: bool,
    looks: list[float],
) -> None:
    """Few or many prefills, an empty path or a full one, looked at between or not."""
    prefills = [(s, d, t, min(r, t - 1)) for s, d, t, r in sorted(drawn)]
    sizes = sizes_of(kinds)
    path = KvPath(rate, 0.25, (), sizes, layerwise=layerwise)
    landed, _ = landings(path, prefills, looks)
    pieces = []
    for key, (start_s, prefill_s, tokens, resident) in enumerate(prefills):
        ready = ready_times(
            start_s, start_s + prefill_s, sizes.num_layers, layerwise=layerwise
        ).tolist()
        pieces += [(at, key, size) for at, size in zip(ready, sizes(tokens, resident), strict=True)]
    expected = {key: left + 0.25 for key, left in departures(pieces, rate).items()}
    assert landed == pytest.approx(expected, abs=1e-7)
    assert path.sent_bytes == pytest.approx(sum(size for _, _, size in pieces))
    ordered = sorted(pieces)
    for at_s, waits in zip(sorted(looks), landings(path_of(path), prefills, looks)[1], strict=True):
        ready_bytes = [(at, key, size) for at, key, size in ordered if at <= at_s]
        free_s = max(departures(ready_bytes, rate).values(), default=0.0)
        assert waits == pytest.approx(max(0.0, free_s - at_s) * rate, abs=1e-3)


def path_of(path: KvPath) -> KvPath:
    """Another like it."""
    assert path._sizes is not None
    layerwise = path._count == path._sizes.num_layers
    return KvPath(path.rate_bytes_per_s, path.delay_s, (), path._sizes, layerwise=layerwise)


def test_sizes_are_closed_forms_of_the_layers() -> None:
    sizes = sizes_of([(3, 10, 0), (0, 500, 7), (9, 0, 7)])
    for tokens, resident in ((1, 0), (63, 10), (200, 199)):
        each = sizes(tokens, resident)
        assert sizes.total(tokens, resident) == each.sum()
        assert [sizes.of_layer(n, tokens, resident) for n in range(3)] == each.tolist()
        assert sizes.most(tokens, resident) >= each.max()


@pytest.mark.parametrize("others", [0, 2, 20])
def test_what_is_offered_before_its_prefill_starts_takes_no_time_until_then(others: int) -> None:
    """A prefill that fetches a prefix first is announced when the fetch begins."""
    sizes = sizes_of([(1, 0, 0), (1, 0, 0)])
    path = KvPath(100.0, 0.0, (), sizes)
    for key in range(others):
        path.offer(key, 0.0, 10.0, 4)
    path.offer(100, 1.0, 3.0, 50)
    path.offer(101, 2.0, 12.0, 400)  # its layers are ready at 7 and 12
    assert path.carried(1.5).acked_bytes == 0.0
    assert path.landed_s(100, 3.0) == pytest.approx(3.5)
    assert path.landed_s(101, 12.0) == pytest.approx(16.0)


def test_many_senders_and_few_take_turns_at_one_path() -> None:
    """Between few, which are looked at one by one, and many, which are looked at in a table."""
    sizes = sizes_of([(2, 0, 0), (1, 3, 0), (0, 7, 0)])
    prefills = [(0.37 * n, 2.0 + n % 5, 20 + n, 0) for n in range(60)]
    prefills += [(60.0 + 3.0 * n, 2.5, 90, 0) for n in range(20)]
    prefills += [(120.0 + 0.01 * n, 4.0, 50, 0) for n in range(30)]
    path = KvPath(150.0, 0.0, (), sizes)
    landed, _ = landings(path, prefills, [])
    pieces = [
        (at_s, key, size)
        for key, (start_s, prefill_s, tokens, _) in enumerate(prefills)
        for at_s, size in zip(
            ready_times(start_s, start_s + prefill_s, 3, layerwise=True).tolist(),
            sizes(tokens).tolist(),
            strict=True,
        )
    ]
    assert landed == pytest.approx(departures(pieces, 150.0), abs=1e-9)
