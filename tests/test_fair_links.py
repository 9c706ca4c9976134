"""Fair sharing of links against a fluid in small steps, a single transfer and the layered queue."""

import math
from pathlib import Path

import numpy as np
import pytest
from fair_links_reference import FluidLine, Piece, fluid
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.architecture import Architecture
from harness.attention import Layer
from harness.kv_layers import LayerSizes, ready_times
from harness.kv_path import KvPath
from harness.simulator.course import Course
from harness.simulator.fair_links import FairLinks, Line
from harness.transfer_model import exposure, prefill_pieces
from harness.transfer_rate import Flows, SlowStart, TcpPath, payload_bytes_per_s

FOREVER = Course(((0.0, math.inf),))
#: (far cluster, sender in it, near cluster, receiver in it, start, duration, tokens)
Drawn = tuple[int, int, int, int, float, float, int]
TRANSFERS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.integers(0, 1),
        st.integers(0, 1),
        st.integers(0, 1),
        st.floats(0, 10),
        st.floats(0.1, 5),
        st.integers(1, 40),
    ),
    min_size=1,
    max_size=8,
)


def constant(value: float) -> Course:
    return Course(((0.0, value),))


def sizes_of(*layers: tuple[int, int]) -> LayerSizes:
    """Layers of (growing, fixed) bytes."""
    made = tuple(Layer(f"k{n}", g, 0, 0, f) for n, (g, f) in enumerate(layers))
    return LayerSizes(Architecture("test", Path("test.json"), made, {}, "bf16"))


SIZES = sizes_of((3, 0), (0, 50), (5, 10), (1, 0))


def line_of(one: Drawn) -> Line:
    far, sender, near, receiver = one[:4]
    return (f"s{far}{sender}", f"far{far}"), (f"r{near}{receiver}", f"near{near}")


def departures(
    links: FairLinks, transfers: list[tuple[Line, float, float, int]], looks: list[float]
) -> dict[int, float]:
    """When the last byte of each leaves."""
    events = [(start_s, 0, key) for key, (_, start_s, _, _) in enumerate(transfers)]
    events += [(at_s, 1, key) for key, at_s in enumerate(looks)]
    found: dict[int, float] = {}
    for at_s, kind, key in sorted(events):
        if kind == 0:
            line, start_s, end_s, tokens = transfers[key]
            links.offer(key, line, start_s, end_s, tokens)
        else:
            found.update(links.departed(at_s))
    found.update(links.departed(1e9))
    return found


@settings(max_examples=60, deadline=None)
@given(
    TRANSFERS,
    st.tuples(*(st.sampled_from([40.0, 100.0, 250.0, 1e4]) for _ in range(4))),
    st.sampled_from([30.0, 80.0, math.inf]),
    st.booleans(),
    st.booleans(),
    st.lists(st.floats(0, 30), max_size=6),
)
def test_it_is_a_fluid_shared_fairly(
    drawn: list[Drawn],
    rates: tuple[float, ...],
    cap: float,
    layerwise: bool,
    changes: bool,
    looks: list[float],
) -> None:
    """Two clusters on either side, capped lines or not, with an outage and a slower while."""
    steps = {
        "from far0": ((0.0, rates[0]), (2.0, 0.0), (3.5, rates[0] / 2), (9.0, rates[0])),
        "from far1": ((0.0, rates[1]),),
        "to near0": ((0.0, rates[2]),),
        "to near1": ((0.0, rates[3]),),
    }
    if not changes:
        steps["from far0"] = ((0.0, rates[0]),)
    caps = ((0.0, cap), (4.0, cap / 2)) if changes else ((0.0, cap),)
    courses = {name: Course(one) for name, one in steps.items()}
    links = FairLinks(
        {name: courses[f"from {name}"] for name in ("far0", "far1")},
        {name: courses[f"to {name}"] for name in ("near0", "near1")},
        Course(caps),
        SIZES,
        layerwise=layerwise,
    )
    transfers = [(line_of(one), one[4], one[4] + one[5], one[6]) for one in drawn]
    found = departures(links, transfers, looks)
    lines: dict[tuple[str, str], FluidLine] = {}
    count = SIZES.num_layers if layerwise else 1
    for key, ((sender, far), (receiver, near)) in enumerate(line for line, *_ in transfers):
        ends = (f"from {far}", f"to {near}")
        line = lines.setdefault((sender, receiver), FluidLine(ends))
        _, start_s, end_s, tokens = transfers[key]
        ready = ready_times(start_s, end_s, count, layerwise=layerwise).tolist()
        parts = SIZES(tokens).tolist() if layerwise else [SIZES.total(tokens)]
        for n, (at_s, nbytes) in enumerate(zip(ready, parts, strict=True)):
            line.pieces.append(Piece(at_s, nbytes, key, n == count - 1))
    step_s = 0.01
    want = fluid(
        list(lines.values()),
        lambda now_s: {name: one.at(now_s) for name, one in courses.items()},
        Course(caps).at,
        step_s,
        1e4,
    )
    assert found.keys() == want.keys()
    for key, at_s in want.items():
        # Each of the pieces that were in the way began up to a step late.
        assert found[key] == pytest.approx(at_s, abs=step_s * (4 + 2 * count * len(drawn)))
    mean = sum(found.values()) / len(found)
    assert mean == pytest.approx(sum(want.values()) / len(want), abs=0.25)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 200_000),
    st.floats(0.05, 5),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([None, 2e6, 2e7]),
    st.sampled_from([0.0, 1e-4, 1e-2]),
    st.floats(0.001, 0.2),
    st.booleans(),
)
def test_a_transfer_alone_is_that_of_the_transfer_model(
    tokens: int,
    prefill_s: float,
    connections: int,
    cap: float | None,
    loss: float,
    rtt_s: float,
    layerwise: bool,
) -> None:
    architecture = Architecture(
        "test",
        Path("test.json"),
        tuple(Layer(f"k{n}", g, 0, 0, 4000 * g) for n, g in enumerate((3, 0, 7, 1, 40))),
        {},
        "bf16",
    )
    path = TcpPath(1e7, rtt_s, cap, loss)
    flows = Flows(connections)
    rate = payload_bytes_per_s(path, flows)
    links = FairLinks(
        {"far": constant(rate)}, {}, FOREVER, LayerSizes(architecture), layerwise=layerwise
    )
    line = ("s", "far"), ("r", "near")
    found = departures(links, [(line, 2.0, 2.0 + prefill_s, tokens)], [])
    pieces = prefill_pieces(
        architecture, [float(tokens)], lambda new, _: prefill_s * np.ones_like(new)
    )
    want = exposure(pieces, rate, layerwise=layerwise)
    assert found[0] - 2.0 - prefill_s == pytest.approx(float(want.exposed_s[0]), abs=1e-9)


@pytest.mark.parametrize("connections", [1, 4])
@pytest.mark.parametrize("tokens", [3, 300, 30_000])
def test_the_first_transfer_of_a_line_begins_in_slow_start(connections: int, tokens: int) -> None:
    architecture = Architecture("test", Path("t.json"), (Layer("k", 500, 0, 0, 0),), {}, "bf16")
    path, flows = TcpPath(1.25e7, 0.04), Flows(connections)
    rate, slow_start = payload_bytes_per_s(path, flows), SlowStart.of(path, flows)
    links = FairLinks(
        {"far": constant(rate)}, {}, FOREVER, LayerSizes(architecture), slow_start=slow_start
    )
    line = ("s", "far"), ("r", "near")
    first = departures(links, [(line, 0.0, 1.0, tokens)], [])[0]
    pieces = prefill_pieces(architecture, [float(tokens)], lambda new, _: np.ones_like(new))
    cold = exposure(pieces, rate, slow_start=slow_start).exposed_s[0]
    assert first - 1.0 == pytest.approx(float(cold))
    links.offer(1, line, 2e9, 2e9 + 1, tokens)
    ((_, second),) = links.departed(3e9)
    warm = exposure(pieces, rate).exposed_s[0]
    assert second - 2e9 - 1 == pytest.approx(float(warm), abs=1e-6)


def test_without_a_bound_the_mean_landing_is_that_of_the_layered_queue() -> None:
    """To less than the time of one layer: the same bytes leave, shared out by turns or at once."""
    rng = np.random.default_rng(7)
    sizes = sizes_of(*(((1000, 20_000),) * 24))
    rate = 1e8
    transfers, free_s = [], [0.0] * 4
    for _ in range(400):
        sender = int(np.argmin(free_s))
        start_s = free_s[sender] + float(rng.exponential(0.5))
        tokens = int(rng.integers(500, 3000))
        free_s[sender] = start_s + tokens / 1000
        line = (f"s{sender}", "far"), (f"r{rng.integers(3)}", "near")
        transfers.append((line, start_s, free_s[sender], tokens))
    moved = sum(sizes.total(tokens) for *_, tokens in transfers)
    assert 0.6 < moved / rate / max(free_s) < 0.95
    fair = departures(FairLinks({"far": constant(rate)}, {}, FOREVER, sizes), transfers, [])
    queue = KvPath(rate, 0.0, (), sizes)
    events = [(start, 0, key) for key, (_, start, _, _) in enumerate(transfers)]
    events += [(end, 1, key) for key, (_, _, end, _) in enumerate(transfers)]
    layered = {}
    for _, kind, key in sorted(events):
        _, start_s, end_s, tokens = transfers[key]
        if kind == 0:
            queue.offer(key, start_s, end_s, tokens)
        else:
            layered[key] = queue.landed_s(key, end_s)
    tails = [
        np.mean([found[key] - end for key, (_, _, end, _) in enumerate(transfers)])
        for found in (fair, layered)
    ]
    layer_s = moved / len(transfers) / sizes.num_layers / rate
    assert abs(tails[0] - tails[1]) < layer_s
    assert max(fair.values()) == pytest.approx(max(layered.values()), abs=1e-6)


def test_what_waits_and_what_left_are_all_that_was_ready() -> None:
    links = FairLinks({"far": constant(100.0)}, {}, constant(40.0), SIZES, layerwise=False)
    links.offer(0, (("a", "far"), ("r", "near")), 0.0, 1.0, 10)
    links.offer(1, (("b", "far"), ("r", "near")), 0.0, 1.0, 20)
    total = SIZES.total(10) + SIZES.total(20)
    assert links.carried("far", 0.5) == (0.0, 0.0)
    seen = links.carried("far", 2.0)
    assert seen.acked_bytes == pytest.approx(80.0)
    assert seen.waiting_bytes == pytest.approx(total - 80.0)
    assert links.carried("far", 1e3) == pytest.approx((total, 0.0))
    assert links.next_s() == math.inf


def test_what_was_dropped_lands_for_nobody_and_sends_no_more() -> None:
    links = FairLinks({"far": constant(100.0)}, {}, FOREVER, SIZES)
    for key, sender in enumerate("ab"):
        links.offer(key, ((sender, "far"), ("r", "near")), 0.0, 4.0, 10)
    assert links.departed(1.5) == []
    links.drop(0)
    assert [key for key, _ in links.departed(100.0)] == [1]
    assert links.ready_bytes["far"] == SIZES.total(10) + SIZES(10)[0]


def test_a_link_that_stays_down_lands_nothing() -> None:
    down = Course(((0.0, 100.0), (1.0, 0.0)))
    links = FairLinks({"far": down}, {}, FOREVER, SIZES)
    links.offer(0, (("a", "far"), ("r", "near")), 0.0, 4.0, 10)
    assert links.departed(1e6) == []
    assert links.next_s() == math.inf
