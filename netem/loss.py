"""Loss models of a link: which packets are lost, as a chance a packet and how long bursts are.

Three models, the ones tc-netem has. Independent: every packet with probability p, if wanted with a
correlation from one to the next. Gilbert-Elliott: a chain good -> bad with probability p and bad ->
good with r at each packet; a packet that finds the chain bad is lost with ``loss_bad``, one that
finds it good with ``loss_good``. Four states (GI, Salsano et al. 2009): 1 received in a gap, 2
received in a burst, 3 lost in a burst, 4 lost alone; 1 -> 3, 3 -> 1, 3 -> 2, 2 -> 3 and 1 -> 4 have
the probabilities p13 to p14, and 4 -> 1 is certain.

``mean_rate`` is the stationary share of lost packets, ``mean_burst_packets`` the mean length of a
run of losses: the share lost over the chance that a packet is the first loss of a run.
"""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class IndependentLoss:
    """``correlation``: of a packet's fate with the one before; a loss is followed by a loss with
    the chance p + correlation (1 - p)."""

    probability: float
    correlation: float = 0.0

    @property
    def mean_rate(self) -> float:
        return self.probability

    @property
    def mean_burst_packets(self) -> float:
        return 1 / ((1 - self.probability) * (1 - self.correlation))

    def fault(self) -> str | None:
        """What makes the model impossible, in words."""
        return _outside(self.probability, "the loss", most_excluded=True) or _outside(
            self.correlation, "the loss correlation", most_excluded=True
        )


@dataclass(frozen=True, slots=True)
class GilbertElliott:
    """Loss in bursts; with the default ``loss_bad`` a burst has a mean of 1 / r packets."""

    p: float
    r: float
    loss_bad: float = 1.0
    loss_good: float = 0.0

    @property
    def mean_rate(self) -> float:
        good, bad = self._stationary()
        return good * self.loss_good + bad * self.loss_bad

    @property
    def mean_burst_packets(self) -> float:
        good, bad = self._stationary()
        after_good = (1 - self.p) * self.loss_good + self.p * self.loss_bad
        after_bad = self.r * self.loss_good + (1 - self.r) * self.loss_bad
        starts = good * (1 - self.loss_good) * after_good + bad * (1 - self.loss_bad) * after_bad
        return self.mean_rate / starts if starts > 0 else 0.0

    def _stationary(self) -> tuple[float, float]:
        """Shares of packets that find the chain good and bad."""
        bad = self.p / (self.p + self.r)
        return 1 - bad, bad

    def fault(self) -> str | None:
        """What makes the model impossible, in words."""
        for name in self.__slots__:
            if told := _outside(getattr(self, name), f"the loss model's {name}"):
                return told
        if self.r == 0:
            return "the loss model's r must be above 0%: bursts of loss would never end"
        return "the loss model loses every packet" if self.mean_rate >= 1 else None


@dataclass(frozen=True, slots=True)
class FourStateLoss:
    """The general model: bursts with received packets in them, and losses alone."""

    p13: float
    p31: float
    p32: float = 0.0
    p23: float = 1.0
    p14: float = 0.0

    @property
    def mean_rate(self) -> float:
        gap, received, lost, alone = self._stationary()
        return (lost + alone) / (gap + received + lost + alone)

    @property
    def mean_burst_packets(self) -> float:
        gap, received, lost, alone = self._stationary()
        starts = gap * (self.p13 + self.p14) + received * self.p23
        return (lost + alone) / starts if starts > 0 else 0.0

    def _stationary(self) -> tuple[float, float, float, float]:
        """Weights of the states 1, 2, 3, 4 relative to state 1."""
        if self.p13 == 0:
            return 1.0, 0.0, 0.0, self.p14
        lost = self.p13 / self.p31
        return 1.0, lost * self.p32 / self.p23 if self.p32 else 0.0, lost, self.p14

    def fault(self) -> str | None:
        """What makes the model impossible, in words."""
        for name in self.__slots__:
            if told := _outside(getattr(self, name), f"the loss model's {name}"):
                return told
        if self.p13 + self.p14 > 1 or self.p31 + self.p32 > 1:
            return "the loss model's p13 + p14 and p31 + p32 must each be at most 100%"
        if self.p13 > 0 and (self.p31 == 0 or (self.p32 > 0 and self.p23 == 0)):
            return "the loss model's p31, and p23 where p32 is used, must be above 0%"
        return None


Loss: TypeAlias = IndependentLoss | GilbertElliott | FourStateLoss


def bursty(rate: float, mean_burst_packets: float) -> GilbertElliott:
    """Bursts of a mean length that together lose ``rate`` of the packets (0 < rate < 1)."""
    r = 1 / mean_burst_packets
    return GilbertElliott(p=rate * r / (1 - rate), r=r)


def _outside(value: float, what: str, *, most_excluded: bool = False) -> str | None:
    if not 0 <= value <= 1:
        return f"{what} must lie between 0% and 100%"
    return f"{what} must be below 100%" if most_excluded and value == 1 else None
