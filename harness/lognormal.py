"""Log-normal lengths truncated to [low, high]: the law of redrawing until a draw lies inside.

X = exp(mu + sigma * Z), Z standard normal, given low <= X <= high. Sampled by its quantile
function, x(u) = exp(mu + sigma * Phi^-1(a + u * (b - a))) with a = Phi((ln low - mu) / sigma) and b
alike: the same law as redrawing with exactly one uniform a draw, so that the first n lengths do not
depend on how many follow and no truncation takes long.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TruncatedLogNormal:
    """``sigma = 0`` or ``low = high`` give a constant."""

    mu: float
    sigma: float
    low: float
    high: float

    @property
    def constant(self) -> float | None:
        """The only value there is, if there is only one."""
        if self.low == self.high:
            return self.low
        return math.exp(self.mu) if self.sigma == 0 else None

    @property
    def mass(self) -> float:
        """Share of the untruncated law inside the bounds; 1 - mass would be redrawn."""
        if self.low == self.high:
            return 1.0
        if self.sigma == 0:
            return float(math.log(self.low) <= self.mu <= math.log(self.high))
        below, above = self._ends()
        return above - below

    def quantile(self, share: FloatArray) -> FloatArray:
        """x(u) for ``share`` u in [0, 1], elementwise; never outside the bounds."""
        if (constant := self.constant) is not None:
            return np.full(share.shape, constant)
        below, above = self._ends()
        inside = below + share * (above - below)
        return np.asarray(
            np.clip(np.exp(self.mu + self.sigma * ndtri(inside)), self.low, self.high)
        )

    def _ends(self) -> tuple[float, float]:
        low, high = math.log(self.low), math.log(self.high)
        return (
            float(ndtr((low - self.mu) / self.sigma)),
            float(ndtr((high - self.mu) / self.sigma)),
        )
