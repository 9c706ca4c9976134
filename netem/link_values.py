"""Values of a link file as they are read: quantities with their unit, and loss models as tables.

A loss is a text such as ``"0.1%"``, which is independent loss, or a table whose ``model`` is one of
independent, bursts, gilbert_elliott and four_state (see ``netem.loss``).
"""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BeforeValidator, Field

from netem.datafile import Table
from netem.loss import FourStateLoss, GilbertElliott, IndependentLoss, Loss, bursty
from netem.units import (
    parse_duration_s,
    parse_fraction,
    parse_rate_bytes_per_s,
    parse_size_bytes,
)

Duration = Annotated[float, BeforeValidator(parse_duration_s)]
Rate = Annotated[float, BeforeValidator(parse_rate_bytes_per_s)]
Fraction = Annotated[float, BeforeValidator(parse_fraction)]
Size = Annotated[int, BeforeValidator(parse_size_bytes)]
Count = Annotated[int, Field(ge=0, lt=2**32)]


class IndependentTable(Table):
    """Every packet by itself."""

    model: Literal["independent"]
    rate: Fraction
    correlation: Fraction = 0.0

    def loss(self) -> Loss | None:
        return IndependentLoss(self.rate, self.correlation) if self.rate else None


class BurstsTable(Table):
    """Gilbert-Elliott loss by what it does: the share lost, and the mean run of losses."""

    model: Literal["bursts"]
    rate: Annotated[Fraction, Field(gt=0, lt=1)]
    mean_burst_packets: Annotated[float, Field(ge=1, le=1e9)]

    def loss(self) -> Loss:
        return bursty(self.rate, self.mean_burst_packets)


class GilbertElliottTable(Table):
    """Gilbert-Elliott loss by its chances."""

    model: Literal["gilbert_elliott"]
    p: Fraction
    r: Fraction
    loss_bad: Fraction = 1.0
    loss_good: Fraction = 0.0

    def loss(self) -> Loss:
        return GilbertElliott(self.p, self.r, self.loss_bad, self.loss_good)


class FourStateTable(Table):
    """The four-state model by its chances."""

    model: Literal["four_state"]
    p13: Fraction
    p31: Fraction
    p32: Fraction = 0.0
    p23: Fraction = 1.0
    p14: Fraction = 0.0

    def loss(self) -> Loss:
        return FourStateLoss(self.p13, self.p31, self.p32, self.p23, self.p14)


AnyLossTable: TypeAlias = Annotated[
    IndependentTable | BurstsTable | GilbertElliottTable | FourStateTable,
    Field(discriminator="model"),
]


def _loss_table(value: Any) -> Any:
    return {"model": "independent", "rate": value} if isinstance(value, str) else value


AnyLoss: TypeAlias = Annotated[AnyLossTable | None, BeforeValidator(_loss_table)]
