"""Exposed transfer: by hand, against the simulator's path, and what holds for every prefill."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_path_reference import departures

from harness.architecture import Architecture, load_architecture
from harness.attention import Layer, Linear, Mla
from harness.kv_path import KvPath, LayerSizes
from harness.profile_file import load_profile
from harness.transfer_model import FloatArray, Pieces, exposure, prefill_pieces
from harness.transfer_rate import SlowStart

PROFILES = Path(__file__).parent.parent / "profiles"
KDA = Layer("kda", fixed_bytes=1000)
MLA = Layer("mla", growing_bytes_per_token=10)
WINDOW = Layer("window", window_tokens=64, window_bytes_per_token=7)


def model(*layers: Layer) -> Architecture:
    return Architecture("test", Path("test.json"), layers, {})


def linear(s_per_token: float) -> Callable[[FloatArray, FloatArray], FloatArray]:
    return lambda new, _cached: new * s_per_token


def by_hand(pieces: Pieces, rate: float, layerwise: bool = True) -> float:
    """max over k of release_k + sum_{j >= k} b_j / rate, less T_prefill."""
    release_s, sizes = pieces.in_order()
    prefill_s = float(pieces.prefill_s)
    if not layerwise:
        release_s = np.full_like(release_s, prefill_s)
    sums = [
        float(release_s[k]) + math.fsum(sizes[k:]) / rate
        for k in range(len(sizes))
    ]  # fmt: skip
    return max(sums) - prefill_s


layers = st.sampled_from([KDA, MLA, WINDOW, Layer("both", 3, 16, 5, 200)])
cases = st.fixed_dictionaries(
    {
        "architecture": st.lists(layers, min_size=1, max_size=6).map(lambda some: model(*some)),
        "new_tokens": st.integers(1, 300),
        "cached_tokens": st.integers(0, 200),
        "chunk_tokens": st.none() | st.integers(8, 400),
    }
)
rates = st.floats(10.0, 1e6)


def pieces_of(case: dict[str, object], prefill_s: float = 1.0) -> Pieces:
    cost = linear(prefill_s / case["new_tokens"])  # type: ignore[operator]  # an int
    return prefill_pieces(prefill_s=cost, **case)  # type: ignore[arg-type]  # of ``cases``


def test_a_short_last_chunk() -> None:
    """5 tokens in chunks of 2 at 1 s a token, layers MLA, KDA, MLA, KDA; 100 bytes/s.

    Chunks end at 2, 4 and 5 s. The two states of 1000 bytes are final in the last second only:
    released at 4.5 and 5 s, with 10 bytes of MLA before each.
    """
    pieces = prefill_pieces(model(MLA, KDA, MLA, KDA), 5, linear(1.0), chunk_tokens=2)
    assert pieces.release_s == pytest.approx(
        np.array([[0.5, 1, 1.5, 2], [2.5, 3, 3.5, 4], [4.25, 4.5, 4.75, 5]])
    )
    assert pieces.sizes_bytes.tolist() == [
        [20, 0, 20, 0],
        [20, 0, 20, 0],
        [10, 1000, 10, 1000],
    ]
    found = exposure(pieces, 100.0, one_way_s=0.125)
    # The first state decides: 4.5 s + 2010 bytes; one piece earlier gives 4.25 s + 2020 bytes.
    assert found.critical == 9
    assert found.exposed_s == pytest.approx(4.5 + 20.10 - 5 + 0.125)
    assert found.sending_s == pytest.approx(21.0)
    # At 10,000 bytes/s it is the last one; without pipelining all that there is.
    assert exposure(pieces, 10_000.0).exposed_s == pytest.approx(0.1)
    assert exposure(pieces, 10_000.0, layerwise=False).exposed_s == pytest.approx(0.21)


def test_the_last_layer_is_no_bound() -> None:
    """A large layer before a small last one decides, at neither end of the order."""
    small, large = Layer("small", fixed_bytes=1), Layer("large", fixed_bytes=100)
    pieces = prefill_pieces(model(small, large, small), 3, linear(1.0))
    found = exposure(pieces, 50.0)
    assert found.critical == 1
    assert found.exposed_s == pytest.approx(2 + 101 / 50 - 3)
    assert found.exposed_s > max(1 / 50, 102 / 50 - 3 * 2 / 3), "of the last, of all less hidden"


@given(case=cases)
def test_pieces_sum_to_what_must_move(case: dict[str, object]) -> None:
    pieces = pieces_of(case)
    architecture, new, cached = (
        case[key] for key in ("architecture", "new_tokens", "cached_tokens")
    )
    expected = architecture.moved_bytes(new + cached, cached)  # type: ignore[attr-defined, operator]
    assert pieces.sizes_bytes.sum() == pytest.approx(expected)
    assert np.all(pieces.sizes_bytes >= 0)
    release_s, _ = pieces.in_order()
    assert np.all(np.diff(release_s) >= 0)
    assert release_s[-1] == pieces.prefill_s


@given(case=cases, rate=rates, layerwise=st.booleans())
def test_it_is_the_maximum_over_pieces(
    case: dict[str, object], rate: float, layerwise: bool
) -> None:
    pieces = pieces_of(case)
    found = exposure(pieces, rate, layerwise=layerwise)
    assert found.exposed_s == pytest.approx(by_hand(pieces, rate, layerwise), rel=1e-9, abs=1e-9)


@given(
    case=cases, rate=rates, layerwise=st.booleans(), free_s=st.floats(-1.0, 5.0),
    delay_s=st.floats(0.0, 0.3),
)  # fmt: skip
def test_it_equals_the_simulators_path(
    case: dict[str, object], rate: float, layerwise: bool, free_s: float, delay_s: float
) -> None:
    """A request alone, behind another that keeps the path busy until ``free_s``; the recursion of
    the simulator's path, piece by piece (``tests/test_kv_path.py`` has the two agree)."""
    pieces = pieces_of(case)
    start_s, prefill_s = 10.0, float(pieces.prefill_s)
    release_s, sizes = pieces.in_order()
    if not layerwise:
        release_s = np.full_like(release_s, prefill_s)
    ready = (start_s + release_s).tolist()
    queue = [(at, 1, size) for at, size in zip(ready, sizes.tolist(), strict=True)]
    busy_until_s = start_s + free_s if free_s > 0 else float("-inf")
    landed_s = departures(queue, rate, busy_until_s)[1] + delay_s
    found = exposure(pieces, rate, layerwise=layerwise, one_way_s=delay_s, free_s=free_s)
    assert found.exposed_s == pytest.approx(landed_s - start_s - prefill_s, rel=1e-9, abs=1e-7)


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_shipped_model_costs_what_the_simulator_says(layerwise: bool) -> None:
    architecture = load_architecture(PROFILES / "models" / "prfaas-1t.json")
    profile = load_profile(PROFILES / "prfaas-1t-8xh200.json")
    tokens = np.array([500.0, 8192.0, 32_000.0, 131_072.0])
    pieces = prefill_pieces(architecture, tokens, profile.prefill_s_array)
    found = exposure(pieces, 1.25e9, layerwise=layerwise, one_way_s=0.0004)
    sizes = LayerSizes(architecture)
    for index, length in enumerate(tokens.astype(int).tolist()):
        prefill_s = profile.prefill_s(length)
        path = KvPath(1.25e9, 0.0004, (), sizes, layerwise=layerwise)
        path.offer(0, 0.0, prefill_s, length)
        expected_s = path.landed_s(0, prefill_s) - prefill_s
        assert found.exposed_s[index] == pytest.approx(expected_s, rel=1e-9)


@given(case=cases, rate=rates, faster=st.floats(1.0, 100.0))
def test_pipelining_and_a_faster_path_never_cost(
    case: dict[str, object], rate: float, faster: float
) -> None:
    pieces = pieces_of(case)
    slack = 1e-9
    whole = exposure(pieces, rate, layerwise=False)
    piped = exposure(pieces, rate)
    assert 0 <= piped.exposed_s <= whole.exposed_s + slack
    assert exposure(pieces, rate * faster).exposed_s <= piped.exposed_s + slack
    cold = SlowStart(0.05, 100.0)
    assert piped.exposed_s <= exposure(pieces, rate, slow_start=cold).exposed_s + slack
    cold_whole = exposure(pieces, rate, layerwise=False, slow_start=cold)
    assert exposure(pieces, rate, slow_start=cold).exposed_s <= cold_whole.exposed_s + slack


@given(case=cases, rate=rates, piece=st.integers(0, 10_000), more=st.floats(0.0, 1e4))
def test_more_bytes_never_show_less(
    case: dict[str, object], rate: float, piece: int, more: float
) -> None:
    pieces = pieces_of(case)
    larger = pieces.sizes_bytes.copy()
    larger.flat[piece % larger.size] += more
    heavier = Pieces(pieces.release_s, larger, pieces.prefill_s)
    assert exposure(heavier, rate).exposed_s >= exposure(pieces, rate).exposed_s - 1e-9


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=5), chunk=st.integers(8, 400))
def test_many_lengths_at_once_are_each_alone(lengths: list[int], chunk: int) -> None:
    """Also where shorter prompts have fewer chunks; rates and delays of their own."""
    architecture = model(KDA, WINDOW, MLA, KDA)
    rate, delay_s = np.linspace(50.0, 500.0, len(lengths)), np.linspace(0.0, 1.0, len(lengths))
    together = prefill_pieces(architecture, lengths, linear(0.01), 7.0, chunk)
    found = exposure(together, rate, one_way_s=delay_s)
    for index, length in enumerate(lengths):
        alone = exposure(
            prefill_pieces(architecture, length, linear(0.01), 7.0, chunk),
            rate[index],
            one_way_s=delay_s[index],
        )
        assert found.exposed_s[index] == pytest.approx(alone.exposed_s)
        assert found.sending_s[index] == pytest.approx(alone.sending_s)


def test_chunks_expose_less_growing_kv_and_all_of_the_state() -> None:
    """What chunked prefill does to a 3:1 hybrid: the state still waits for the last chunk."""
    kda = Linear("kda", 64, 128, 128, 4, 24576).layer("kda", "bf16")
    mla = Mla(512, 64).layer("mla", "bf16")
    hybrid, cost = model(kda, kda, kda, mla), linear(3e-5)
    slow = 20e6
    chunked, whole = (
        exposure(prefill_pieces(hybrid, 20_000, cost, chunk_tokens=size), slow)
        for size in (4096, None)
    )
    state_s = 3 * kda.fixed_bytes / slow
    assert state_s - 0.6 <= chunked.exposed_s < whole.exposed_s


@pytest.mark.parametrize("wrong", [{"new_tokens": 0}, {"cached_tokens": -1}, {"chunk_tokens": 0}])
def test_impossible_prefills_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"give more|needs new tokens"):
        prefill_pieces(model(MLA), **{"new_tokens": 5, **wrong}, prefill_s=linear(1.0))
