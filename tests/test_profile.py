"""Profiles: Table 6 of the paper, interpolation against numpy, refusals by name."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core import ScenarioError
from harness.profile import Profile
from harness.profile_file import load_profile

PROFILES = Path(__file__).parents[1] / "profiles"
H200 = load_profile(PROFILES / "prfaas-1t-8xh200.json")
H20 = load_profile(PROFILES / "prfaas-1t-8xh20.json")


def point(new: int, seconds: float, cached: int = 0) -> dict[str, Any]:
    return {
        "new_tokens": new,
        "cached_tokens": cached,
        "prefill_s": seconds,
        "provenance": "measured",
        "source": "test",
    }


def step(batch: int, context: int, seconds: float) -> dict[str, Any]:
    return {
        "batch": batch,
        "context_tokens": context,
        "step_s": seconds,
        "provenance": "measured",
        "source": "test",
    }


VALID: dict[str, Any] = {
    "schema_version": 1,
    "name": "p",
    "model": "m",
    "hardware": "8xTest",
    "gpus_per_instance": 8,
    "engine": {"name": "test", "version": "1"},
    "prefill": {"interpolation": "log_log", "points": [point(10, 1.0), point(1000, 10.0)]},
    "decode": {
        "max_batch": 4,
        "provenance": "measured",
        "source": "test",
        "points": [step(b, c, 0.01 * b + 1e-6 * c) for b in (1, 4) for c in (1, 1000)],
    },
}
CACHED = copy.deepcopy(VALID)
CACHED["prefill"]["points"] += [point(10, 2.0, 500), point(1000, 30.0, 500)]
CACHED["prefill"]["points"] += [point(10, 4.0, 2000), point(1000, 90.0, 2000)]


def written(folder: Path, document: object) -> Path:
    path = folder / "profile.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


@pytest.fixture(scope="module")
def cached_profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    """A profile measured with prefixes of 0, 500 and 2000 cached tokens."""
    return load_profile(written(tmp_path_factory.mktemp("cached"), CACHED))


def test_table_6_capacities_follow_from_the_profiles() -> None:
    assert 4 / H200.prefill_s(45_046) == pytest.approx(1.61, rel=1e-9)
    assert 4 / H200.prefill_s(27_486) == pytest.approx(2.45, rel=1e-9)
    assert 3 / H20.prefill_s(10_224) == pytest.approx(1.64, rel=1e-9)
    assert 9 / H20.prefill_s(27_486) == pytest.approx(2.11, rel=1e-9)
    decode = H20.decode_max_batch / (H20.decode_step_s(20, 27_486) * 1024)
    assert [round(n * decode, 2) for n in (3, 5, 8)] == [2.34, 3.91, 6.25]


def test_table_5_prefill_times_are_points() -> None:
    for tokens, seconds in ((1024, 0.44), (8192, 0.72), (32_000, 1.84), (131_072, 7.46)):
        assert H200.prefill_s(tokens) == pytest.approx(seconds, rel=1e-12)
    # 7.46 s at 131,072 is the published 7.40 s moved from 130,000.
    assert H200.prefill_s(130_000) == pytest.approx(7.40, abs=0.01)


def test_every_point_says_how_it_is_known() -> None:
    for profile in (H200, H20):
        assert all(p.provenance and p.source for p in profile.prefill_points)
        assert all(p.provenance and p.source for p in profile.decode_points)
    assert [p.provenance for p in H20.prefill_points] == [
        "stand_in",
        "stand_in",
        "derived",
        "derived",
        "derived",
        "stand_in",
    ]
    assert sum(p.provenance == "published" for p in H200.prefill_points) == 4


@given(st.integers(1, 131_072))
def test_scalar_vector_and_numpy_agree(tokens: int) -> None:
    for profile in (H200, H20):
        x = [math.log(p.new_tokens) for p in profile.prefill_points]
        y = [math.log(p.prefill_s) for p in profile.prefill_points]
        truth = math.exp(np.interp(math.log(tokens), x, y))
        assert profile.prefill_s(tokens) == pytest.approx(truth, rel=1e-12)
        assert profile.prefill_s_array([tokens])[0] == pytest.approx(truth, rel=1e-12)


def test_the_array_keeps_its_shape_and_never_falls() -> None:
    lengths = np.arange(1, 131_073).reshape(256, 512)
    for profile in (H200, H20):
        seconds = profile.prefill_s_array(lengths)
        assert seconds.shape == lengths.shape
        assert (np.diff(seconds.ravel()) >= -1e-12).all()


def test_without_a_cached_axis_only_new_tokens_cost() -> None:
    assert not H200.has_cached_axis
    assert H200.prefill_s(5000, 100_000) == H200.prefill_s(5000)


@given(new=st.integers(10, 1000), cached=st.integers(0, 2000))
def test_a_cached_axis_is_linear_between_its_curves(
    cached_profile: Profile, new: int, cached: int
) -> None:
    profile = cached_profile
    logs = [math.log(10), math.log(1000)]
    ends = {0: (1.0, 10.0), 500: (2.0, 30.0), 2000: (4.0, 90.0)}
    curves = [math.exp(np.interp(math.log(new), logs, np.log(pair))) for pair in ends.values()]
    truth = float(np.interp(cached, list(ends), curves))
    assert profile.has_cached_axis
    assert profile.prefill_s(new, cached) == pytest.approx(truth, rel=1e-12)
    both = profile.prefill_s_array(np.array([new, new]), np.array([cached, 0]))
    assert both == pytest.approx([truth, curves[0]], rel=1e-12)


def test_a_mean_is_weighted() -> None:
    mean = H200.mean_prefill_s([1024, 8192], [0.25, 0.75])
    assert mean == pytest.approx(0.25 * 0.44 + 0.75 * 0.72)


def test_decode_is_bilinear(tmp_path: Path) -> None:
    profile = load_profile(written(tmp_path, VALID))
    assert profile.decode_step_s(4, 1000) == pytest.approx(0.041)
    assert profile.decode_step_s(2, 500) == pytest.approx(0.0205)
    assert profile.decode_step_s(1, 1) == pytest.approx(0.010001)


@pytest.mark.parametrize("tokens", [0, -1, 131_073, math.nan, math.inf])
def test_a_length_outside_is_refused_by_both_paths(tokens: float) -> None:
    for call in (H200.prefill_s, H200.prefill_s_array):
        with pytest.raises(ScenarioError, match="1 to 131072 new tokens") as caught:
            call(tokens)
        assert "8xh200.json" in str(caught.value)


def test_the_array_names_the_length_that_is_outside() -> None:
    with pytest.raises(ScenarioError, match="131073 new"):
        H200.prefill_s_array(np.array([1, 131_073, 5]))


def test_cached_and_decode_ranges_are_refused(cached_profile: Profile) -> None:
    profile = cached_profile
    for new, cached in ((100, 2001), (100, -1), (9, 500)):
        with pytest.raises(ScenarioError, match="cached prefixes of 0 to 2000"):
            profile.prefill_s(new, cached)
        with pytest.raises(ScenarioError, match="cached prefixes of 0 to 2000"):
            profile.prefill_s_array([new], cached)
    for batch, context in ((5, 10), (0, 10), (1, 1001), (1, math.nan)):
        with pytest.raises(ScenarioError, match="batches of 1 to 4"):
            profile.decode_step_s(batch, context)


def changed(where: str, value: object) -> dict[str, Any]:
    """VALID with the dotted key ``where`` set."""
    document = copy.deepcopy(VALID)
    *tables, last = where.split(".")
    target = document
    for table in tables:
        target = target[table]
    target[last] = value
    return document


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("nonsense", ["not JSON", "line 1, column 1"]),
        ("[" * 100_000, ["JSON"]),
        ('{"a": NaN}', ["Unknown key 'a'"]),
        (changed("prefil", {}), ["'prefil'", "did you mean 'prefill'"]),
        (changed("engine.versoin", "1"), ["'engine.versoin'", "'version'"]),
        (changed("gpus_per_instance", "8"), ["'gpus_per_instance'", "got '8'"]),
        (changed("gpus_per_instance", True), ["'gpus_per_instance'", "got True"]),
        (changed("decode.max_batch", 5), ["max_batch 5", "1 to 4"]),
        (changed("prefill.interpolation", "cubic"), ["'prefill.interpolation'", "log_log"]),
        (changed("prefill.points", [point(1, 1.0)]), ["'prefill.points'"]),
        (
            changed("prefill.points", [point(1, 2.0), point(9, 1.0)]),
            ["falls with length", "2 s at 1", "1 s at 9"],
        ),
        (changed("prefill.points", [point(1, 2.0), point(1, 3.0)]), ["two prefill points"]),
        (
            changed("prefill.points", [point(1, 1.0, 9), point(2, 1.0, 9)]),
            ["no prefill point with 'cached_tokens' 0"],
        ),
        (
            changed("prefill.points", [point(1, 1.0), point(9, 1.0), point(3, 1.0, 5)]),
            ["single prefill point at cached_tokens 5"],
        ),
        (
            changed("prefill.points", [point(1, -1.0), point(9, 1.0)]),
            ["'prefill.points[0].prefill_s'", "got -1.0"],
        ),
        (
            changed("prefill.points", [{**point(1, 1.0), "provenance": "guess"}, point(9, 1.0)]),
            ["'prefill.points[0].provenance'", "'stand_in'"],
        ),
        (
            changed("prefill.points", [{**point(1, 1.0), "prefil_s": 1}, point(9, 1.0)]),
            ["'prefill.points[0].prefil_s'", "'prefill_s'"],
        ),
        (
            changed(
                "decode.points", [step(b, c, 0.1) for b, c in ((1, 1), (1, 9), (4, 1), (5, 9))]
            ),
            ["no decode point for batch 4 at context_tokens 9"],
        ),
        (
            changed("decode.points", [step(b, 1, 0.1) for b in (1, 2, 3, 4)]),
            ["two or more contexts"],
        ),
        (
            changed("decode.points", [step(1, 1, 0.1)] * 4),
            ["two decode points for the same batch"],
        ),
    ],
)
def test_a_wrong_file_is_told_by_name(tmp_path: Path, document: object, words: list[str]) -> None:
    path = written(tmp_path, document)
    with pytest.raises(ScenarioError) as caught:
        load_profile(path)
    message = str(caught.value)
    assert str(path) in message
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_key_given_twice_is_told_by_name(tmp_path: Path) -> None:
    """JSON itself would keep the last of them."""
    path = tmp_path / "twice.json"
    text = json.dumps(VALID)
    path.write_text(text.replace('"max_batch": 4', '"max_batch": 4, "max_batch": 2'))
    with pytest.raises(ScenarioError, match=r"twice\.json is not usable.*'max_batch' twice"):
        load_profile(path)


@pytest.mark.parametrize("seconds", [1e-300, 1e300])
def test_a_time_that_nothing_takes_is_refused(tmp_path: Path, seconds: float) -> None:
    """Squares of it would be 0 or infinite."""
    path = written(tmp_path, changed("prefill.points", [point(1, seconds), point(9, seconds)]))
    with pytest.raises(ScenarioError, match=r"prefill_s.*\.json|\.json.*prefill_s"):
        load_profile(path)


def test_curves_over_disjoint_lengths_are_refused(tmp_path: Path) -> None:
    points = [point(1, 1.0), point(9, 1.0), point(20, 1.0, 5), point(30, 1.0, 5)]
    with pytest.raises(ScenarioError, match="no range of new tokens"):
        load_profile(written(tmp_path, changed("prefill.points", points)))


def test_infinite_and_huge_numbers_are_refused(tmp_path: Path) -> None:
    text = json.dumps(changed("gpus_per_instance", 1))
    for number in ("Infinity", "NaN", "1e999", "9" * 400, "9" * 5000):
        path = written(tmp_path, text.replace('"prefill_s": 1.0', f'"prefill_s": {number}'))
        with pytest.raises(ScenarioError):
            load_profile(path)


#: Points of one curve: lengths apart from each other, times that never fall.
CURVES = st.lists(
    st.tuples(st.integers(1, 5000), st.floats(0, 3)), min_size=2, max_size=9
).map(
    lambda steps: [
        (1 + sum(length for length, _ in steps[: i + 1]), 1e-3 * 1.7 ** sum(
            rise for _, rise in steps[: i + 1]
        ))
        for i in range(len(steps))
    ]
)  # fmt: skip


def curve_profile(folder: Path, curve: list[tuple[int, float]], **how: Any) -> Profile:
    points = [point(new, seconds) for new, seconds in curve]
    return load_profile(written(folder, changed("prefill.points", points)), **how)


@given(CURVES)
def test_any_curve_is_met_at_its_points_and_never_falls(
    tmp_path_factory: pytest.TempPathFactory, curve: list[tuple[int, float]]
) -> None:
    profile = curve_profile(tmp_path_factory.mktemp("curve"), curve)
    assert [profile.prefill_s(new) for new, _ in curve] == pytest.approx(
        [seconds for _, seconds in curve], rel=1e-9
    )
    lengths = np.unique(np.geomspace(curve[0][0], curve[-1][0], 300).round())
    seconds = profile.prefill_s_array(lengths)
    assert (np.diff(seconds) >= -1e-9 * seconds[:-1]).all()


@given(CURVES)
def test_an_extrapolation_joins_on_at_both_ends_and_never_falls(
    tmp_path_factory: pytest.TempPathFactory, curve: list[tuple[int, float]]
) -> None:
    profile = curve_profile(tmp_path_factory.mktemp("curve"), curve, extrapolate="end_slope")
    (first, first_s), (last, last_s) = curve[0], curve[-1]
    before, before_s = curve[-2]
    assert profile.covered_tokens == (first, last)
    assert profile.prefill_s(max(1, first // 3)) == pytest.approx(first_s, rel=1e-9)
    slope = min(2.0, math.log(last_s / before_s) / math.log(last / before))
    assert profile.prefill_s(3 * last) == pytest.approx(last_s * 3**slope, rel=1e-6)
    lengths = np.unique(np.geomspace(1, 10 * last, 300).round())
    seconds = profile.prefill_s_array(lengths)
    assert (np.diff(seconds) >= -1e-9 * seconds[:-1]).all()
    assert seconds == pytest.approx([profile.prefill_s(length) for length in lengths], rel=1e-12)


def test_a_power_law_goes_on_as_it_is(tmp_path: Path) -> None:
    law = [(new, 1e-6 * new**1.5) for new in (100, 1000, 7000)]
    profile = curve_profile(tmp_path, law, extrapolate="end_slope")
    for new in (100, 333, 7000, 500_000):
        assert profile.prefill_s(new) == pytest.approx(1e-6 * new**1.5, rel=1e-12)
    assert profile.prefill_s(3) == pytest.approx(1e-6 * 100**1.5, rel=1e-12)


@pytest.mark.parametrize("tokens", [0, -1, math.nan, math.inf])
def test_what_is_no_length_is_not_extrapolated(tmp_path: Path, tokens: float) -> None:
    profile = curve_profile(tmp_path, [(10, 1.0), (100, 2.0)], extrapolate="end_slope")
    for call in (profile.prefill_s, profile.prefill_s_array):
        with pytest.raises(ScenarioError, match="only new tokens from 1"):
            call(tokens)


def test_cached_prefixes_and_decode_are_never_extrapolated(tmp_path: Path) -> None:
    profile = load_profile(written(tmp_path, CACHED), "end_slope")
    assert profile.prefill_s(5000, 2000) > profile.prefill_s(1000, 2000)
    with pytest.raises(ScenarioError, match="cached prefixes of 0 to 2000"):
        profile.prefill_s(5000, 2001)
    with pytest.raises(ScenarioError, match="batches of 1 to 4"):
        profile.decode_step_s(5, 10)


@pytest.mark.parametrize("without", ["null", "absent"])
def test_a_profile_may_only_prefill(tmp_path: Path, without: str) -> None:
    document = changed("decode", None)
    if without == "absent":
        del document["decode"]
    profile = load_profile(written(tmp_path, document))
    assert not profile.can_decode
    assert (profile.decode_points, profile.decode_max_batch) == ((), None)
    assert profile.prefill_s(100) == pytest.approx(math.sqrt(10))
    for call in (profile.decode_step_s, profile.largest_decode_batch):
        with pytest.raises(ScenarioError, match=r"profile\.json has no decode points: 8xTest"):
            call(1, 10)
    assert H20.can_decode


@given(
    times=st.lists(st.floats(0.01, 0.1), min_size=4, max_size=4),
    limit=st.floats(0.005, 0.11),
    most=st.integers(1, 30),
)
def test_the_largest_batch_is_what_trying_all_finds(
    tmp_path_factory: pytest.TempPathFactory, times: list[float], limit: float, most: int
) -> None:
    grid = list(zip((1, 4, 11, 30), times, strict=True))
    document = changed("decode.points", [step(batch, c, t) for batch, t in grid for c in (1, 1000)])
    document["decode"]["max_batch"] = most
    profile = load_profile(written(tmp_path_factory.mktemp("grid"), document))
    tried = [b for b in range(1, most + 1) if profile.decode_step_s(b, 500) <= limit * (1 + 1e-9)]
    assert profile.largest_decode_batch(500, limit) == max(tried, default=None)
