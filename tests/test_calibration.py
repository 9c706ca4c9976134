"""Calibration: known parameters found again, and the operator model against the paper."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.architecture import load_architecture
from harness.core import ScenarioError
from harness.profile import PrefillPoint
from harness.profile_file import load_profile
from harness.profile_import.calibration import calibrate, fit

PROFILES = Path(__file__).parent.parent / "profiles"


@settings(deadline=None)  # the first fit imports scipy.optimize
@given(
    a=st.floats(0.01, 1.0),
    k=st.floats(0.2, 5.0),
    tool=st.lists(st.floats(1e-3, 50), min_size=3, max_size=9, unique=True),
)
def test_a_known_calibration_is_found_again(a: float, k: float, tool: list[float]) -> None:
    ordered = sorted(tool)
    if any(late < 1.05 * early for early, late in pairwise(ordered)):
        tool = [0.01 * 3**i for i in range(len(tool))]
    found = fit(tool, [a + k * t for t in tool])
    assert found.max_relative_error < 1e-4
    assert [found.seconds(t) for t in tool] == pytest.approx([a + k * t for t in tool], rel=1e-4)
    if max(tool) > a / k:  # else the slope hardly shows in any time
        assert found.slope == pytest.approx(k, rel=2e-2)
    if k * min(tool) < a:
        assert found.intercept_s == pytest.approx(a, rel=2e-2)


def test_the_intercept_is_fitted_but_never_negative() -> None:
    tool = [0.1, 1.0, 10.0]
    assert fit(tool, [2 * t for t in tool]).intercept_s == pytest.approx(0, abs=1e-4)
    below = fit(tool, [2 * t - 0.1 for t in tool])
    assert below.intercept_s >= 0
    assert below.max_relative_error > 0.1


def test_an_error_is_the_same_for_a_time_and_a_rate() -> None:
    found = fit([0.01, 0.1, 1.0, 10.0], [0.5, 0.7, 1.4, 12.0])
    ratios = [1 + residual for residual in found.residuals]
    assert found.max_relative_error == pytest.approx(max(max(r, 1 / r) for r in ratios) - 1)
    inverse = [1 / r for r in ratios]
    assert found.max_relative_error >= max(abs(r - 1) for r in (*ratios, *inverse)) - 1e-12


@pytest.mark.parametrize(
    ("tool", "reference", "words"),
    [
        ([0.1, 0.2], [1.0, 2.0], "3 or more points"),
        ([0.1, 0.1, 0.2], [1.0, 1.0, 2.0], "there are 2"),
        ([0.1, 0.2, 0.3], [3.0, 2.0, 1.0], "do not grow"),
        ([0.0, 0.2, 0.3], [3.0, 2.0, 1.0], "positive"),
    ],
)
def test_too_little_or_contradicting_data_calibrates_nothing(
    tool: list[float], reference: list[float], words: str
) -> None:
    with pytest.raises(ScenarioError, match=words):
        fit(tool, reference)


@pytest.mark.parametrize("model", ["minimax-m2.5", "qwen3-235b", "qwen3.5-397b", "mimo-v2-flash"])
def test_the_operator_model_meets_the_paper_with_two_fitted_parameters(model: str) -> None:
    """T_paper = a + k T_tool, and so Phi_kv, within 11 % at the paper's four lengths."""
    paper = load_profile(PROFILES / f"{model}-8xh200.json")
    tool = load_profile(PROFILES / f"operator/{model}-8xh200.json")
    points, found = calibrate(tool, paper.prefill_points, "Table 3")
    assert found.max_relative_error < 0.11
    assert 0.3 < found.intercept_s < 0.45
    assert 0.9 < found.slope < 1.36
    kv_bytes = load_architecture(PROFILES / f"models/{model}.json").kv_bytes
    at = {point.new_tokens: point.prefill_s for point in points if not point.cached_tokens}
    for point in paper.prefill_points:
        tokens = point.new_tokens
        phi, printed = kv_bytes(tokens) / at[tokens], kv_bytes(tokens) / point.prefill_s
        assert phi == pytest.approx(printed, rel=0.11)
    assert {point.provenance for point in points} == {"modelled"}
    assert all("4 points of Table 3 within" in point.source for point in points)


def test_a_reference_outside_the_points_is_refused() -> None:
    tool = load_profile(PROFILES / "operator/minimax-m2.5-8xh200.json")
    outside = [PrefillPoint(n, 0, 1.0 + n, "measured", "x") for n in (64, 512, 4096)]
    with pytest.raises(ScenarioError, match=r"calibration table lab\.csv .* a request of 64 new"):
        calibrate(tool, outside, "lab.csv")
