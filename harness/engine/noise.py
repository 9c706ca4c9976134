"""Seeded noise on emulated service times: log-normal factors of mean 1.

    factor = exp(s Z - s^2 / 2),   s^2 = ln(1 + cv^2),   Z standard normal

so that the mean service time stays the profile's and its coefficient of variation is ``cv``. Zero
draws nothing: a run without noise is what it was before there was any.
"""

import math

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


class Noise:
    """Factors in the order in which they are asked for."""

    def __init__(self, cv: float = 0.0, seed: int | tuple[int, ...] = 0) -> None:
        assert cv >= 0, cv
        self._sigma = math.sqrt(math.log1p(cv * cv))
        self._random = np.random.default_rng(seed)

    def factor(self) -> float:
        """One factor; 1 without noise."""
        return float(self.factors(1)[0]) if self._sigma else 1.0

    def factors(self, count: int) -> FloatArray:
        """``count`` factors."""  # (count,)
        if not self._sigma:
            return np.ones(count)
        sigma = self._sigma
        drawn: FloatArray = np.exp(self._random.normal(-sigma * sigma / 2, sigma, count))
        return drawn
