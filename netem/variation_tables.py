"""How a link changes, as a table: [variation] of a link file, or a file of its own.

    [[change]]                       # from `at` on, `for` a while or for good
    at = "5s"
    for = "2s"
    direction = "far_to_near"        # default: both
    rate = "10gbit"                  # or rate_factor = "50%"; also delay or rtt, jitter, loss
    [[outage]]
    at = "12s"
    for = "500ms"
    [microburst]                     # other traffic takes `depth` of the rate, again and again
    depth = "90%"
    min_duration = "100us"
    max_duration = "5ms"
    every = "100ms"
    [diurnal]                        # the rate swings like a sine
    swing = "15%"
    period = "24h"
    [[measurements]]                 # a CSV file, its path relative to this one
    file = "iad-dfw.csv"
    direction = "both"

The files are read, and the schedule is made of all of it, by ``netem.variation_file``.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from netem.datafile import Table, validate
from netem.link import LinkError
from netem.link_values import AnyLoss, Duration, Fraction, Rate
from netem.variation import Change

Ways = Literal["both", "near_to_far", "far_to_near"]
PositiveDuration = Annotated[Duration, Field(gt=0)]


class ChangeTable(Table):
    at: Duration
    for_: Annotated[PositiveDuration | None, Field(alias="for")] = None
    direction: Ways = "both"
    rate: Rate | None = None
    rate_factor: Annotated[Fraction | None, Field(gt=0)] = None
    delay: Duration | None = None
    rtt: Duration | None = None
    jitter: Duration | None = None
    loss: AnyLoss = None

    def change(self, where: str) -> Change:
        values = self.model_dump(exclude={"at", "for_", "direction"}, exclude_none=True)
        if not values:
            raise LinkError(f"A [[change]] in {where} changes nothing; give rate, loss or another.")
        if self.rtt is not None and (self.delay is not None or self.direction != "both"):
            raise LinkError(
                f"A [[change]] in {where} has 'rtt', which is both delays: give 'delay' instead "
                "where it is one direction's."
            )
        if self.rate is not None and self.rate_factor is not None:
            raise LinkError(f"Give either 'rate' or 'rate_factor' in a [[change]] in {where}.")
        return Change(
            self.at,
            math.inf if self.for_ is None else self.at + self.for_,
            self.direction,
            rate_bytes_per_s=self.rate,
            rate_factor=1.0 if self.rate_factor is None else self.rate_factor,
            delay_s=self.delay if self.rtt is None else self.rtt / 2,
            jitter_s=self.jitter,
            loss=None if self.loss is None else self.loss.loss(),
        )


class OutageTable(Table):
    at: Duration
    for_: Annotated[PositiveDuration, Field(alias="for")]
    direction: Ways = "both"


class MicroburstTable(Table):
    depth: Annotated[Fraction, Field(gt=0, lt=1)]
    min_duration: PositiveDuration
    max_duration: PositiveDuration
    every: PositiveDuration = 0.1
    seed: int = 0

    def check(self, where: str) -> None:
        if not self.min_duration <= self.max_duration < self.every:
            raise LinkError(
                f"[microburst] in {where}: min_duration <= max_duration < every must hold."
            )


class DiurnalTable(Table):
    swing: Annotated[Fraction, Field(gt=0, lt=1)]
    period: PositiveDuration = 86400.0


class MeasurementsTable(Table):
    file: str
    direction: Ways = "both"


class VariationTable(Table):
    change: list[ChangeTable] = Field(default_factory=list)
    outage: list[OutageTable] = Field(default_factory=list)
    microburst: MicroburstTable | None = None
    diurnal: DiurnalTable | None = None
    measurements: list[MeasurementsTable] = Field(default_factory=list)


def check_variation(variation: Mapping[str, Any], where: str) -> VariationTable:
    """The table, checked; files that it names are not read. LinkError names the key."""
    table = validate(dict(variation), VariationTable, where)
    for one in table.change:
        one.change(where)
    if table.microburst is not None:
        table.microburst.check(where)
    return table
