"""A model's prefill times brought to measured ones: T = a + k T_tool.

An operator model adds up kernels and leaves out what an engine does besides (scheduling, launches,
tokenisation), a cost that hardly grows with length; so a is fitted and never taken as zero. The fit
minimises

    sum over points of  ln((a + k T_tool) / T_reference)^2         a >= 0, k > 0

least squares in relative error, the same whether one looks at times or at rates such as Phi_kv.
Two parameters take three reference points with three different T_tool at least; with three to five
the residuals say little beyond them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.core import ScenarioError
from harness.profile import PrefillPoint, Profile

MIN_POINTS = 3
#: A slope below it means that the tool's time explains nothing of the reference's.
_MIN_SLOPE = 1e-3


@dataclass(frozen=True, slots=True)
class Calibration:
    """``residuals`` are calibrated over reference time - 1, in the order given;
    ``max_relative_error`` the largest error of a time or of its inverse, a rate."""

    intercept_s: float
    slope: float
    max_relative_error: float
    residuals: tuple[float, ...]

    def seconds(self, tool_s: float) -> float:
        """The calibrated time."""
        return self.intercept_s + self.slope * tool_s


def fit(tool_s: Sequence[float], reference_s: Sequence[float]) -> Calibration:
    """a and k from pairs of times. ScenarioError where they do not determine them."""
    from scipy.optimize import least_squares  # slow to import, and few runs calibrate

    tool, reference = np.array(tool_s, dtype=np.float64), np.array(reference_s, dtype=np.float64)
    if tool.shape != reference.shape:
        raise ValueError(f"{len(tool)} times of the tool but {len(reference)} references")
    if not (np.isfinite(tool).all() and np.isfinite(reference).all()):
        raise ValueError("times must be finite")
    if len(np.unique(tool)) < MIN_POINTS or tool.min() <= 0 or reference.min() <= 0:
        raise ScenarioError(
            f"A calibration takes {MIN_POINTS} or more points with different, positive times; "
            f"there are {len(np.unique(tool))}. Add measured points at other lengths."
        )

    def errors(
        parameters: np.ndarray[tuple[int], np.dtype[np.float64]],
    ) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.asarray(np.log((parameters[0] + parameters[1] * tool) / reference))

    start = (0.5 * float(reference.min()), float((reference / tool).min()))
    found = least_squares(errors, start, bounds=((0, 0), (np.inf, np.inf)), x_scale=start)
    intercept_s, slope = map(float, found.x)
    if slope < _MIN_SLOPE:
        raise ScenarioError(
            "The reference times of the calibration do not grow with the tool's: the fitted slope "
            f"is {slope:.2g}. Are they of the same model and lengths?"
        )
    ratio = (intercept_s + slope * tool) / reference
    return Calibration(
        intercept_s,
        slope,
        float(np.maximum(ratio, 1 / ratio).max() - 1),
        tuple((ratio - 1).tolist()),
    )


def calibrate(
    tool: Profile, reference: Sequence[PrefillPoint], reference_name: str
) -> tuple[tuple[PrefillPoint, ...], Calibration]:
    """The tool's prefill points calibrated to ``reference``; they are modelled, and say how.

    The tool's time at a reference length lies between its points. ScenarioError where it has none.
    """
    try:
        tool_s = [tool.prefill_s(point.new_tokens, point.cached_tokens) for point in reference]
    except ScenarioError as error:
        raise ScenarioError(
            f"The calibration table {reference_name} has a point where the table to calibrate has "
            f"no cost: {error}"
        ) from error
    found = fit(tool_s, [point.prefill_s for point in reference])
    how = (
        f"; calibrated: {found.intercept_s:.4g} s + {found.slope:.4g} x that, fitted to "
        f"{len(reference)} points of {reference_name} within {found.max_relative_error:.1%}"
    )
    points = tuple(
        replace(
            point,
            prefill_s=found.seconds(point.prefill_s),
            provenance="modelled",
            source=point.source + how,
        )
        for point in tool.prefill_points
    )
    return points, found
