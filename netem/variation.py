"""Links that change with time: what holds when, as a schedule of changes. No clock.

A ``Change`` replaces values of one or both directions from ``at_s`` until ``until_s``. Where
several hold at once, the one that began last decides, and rate factors multiply; when one ends,
what held beside it holds again: a burst inside a dip ends in the dip, an outage with the loss there
was. ``steps`` turns a schedule and the link it starts from into whole links to apply.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Literal

from netem.link import DIRECTIONS, MIN_RATE_BYTES_PER_S, Direction, LinkError, LinkSpec
from netem.loss import IndependentLoss, Loss
from netem.units import format_duration_s, format_fraction, format_rate

#: As near to every packet as a description comes; on the wire of tc-netem it is every packet.
OUTAGE_LOSS = IndependentLoss(math.nextafter(1.0, 0.0))
#: A day is drawn in half hours.
_DIURNAL_STEPS = 48


@dataclass(frozen=True, slots=True)
class Change:
    """Values that hold from ``at_s`` until ``until_s``; None leaves a value as it is."""

    at_s: float
    until_s: float = math.inf
    direction: Literal["both", "near_to_far", "far_to_near"] = "both"
    rate_bytes_per_s: float | None = None
    rate_factor: float = 1.0
    delay_s: float | None = None
    jitter_s: float | None = None
    loss: Loss | None = None

    def scaled(self, time_scale: float, byte_scale: float) -> "Change":
        """As ``LinkSpec.scaled``."""
        rate, delay_s, jitter_s = self.rate_bytes_per_s, self.delay_s, self.jitter_s
        return replace(
            self,
            at_s=self.at_s / time_scale,
            until_s=self.until_s / time_scale,
            rate_bytes_per_s=None if rate is None else rate * time_scale / byte_scale,
            delay_s=None if delay_s is None else delay_s / time_scale,
            jitter_s=None if jitter_s is None else jitter_s / time_scale,
        )


@dataclass(frozen=True, slots=True)
class Step:
    """From ``at_s`` on the link is ``spec``; ``words`` tell what that changes."""

    at_s: float
    spec: LinkSpec
    words: str


@dataclass(frozen=True, slots=True)
class LinkSchedule:
    """What changes when, in seconds from its start."""

    changes: tuple[Change, ...] = ()

    def scaled(self, time_scale: float, byte_scale: float) -> "LinkSchedule":
        """The schedule of the link ``LinkSpec.scaled`` gives."""
        return LinkSchedule(tuple(one.scaled(time_scale, byte_scale) for one in self.changes))

    def spec_at(self, base: LinkSpec, at_s: float) -> LinkSpec:
        """The link at an instant. LinkError when the changes make an impossible one."""
        ordered = sorted(self.changes, key=lambda change: change.at_s)
        return _changed(base, [one for one in ordered if one.at_s <= at_s < one.until_s], at_s)

    def steps(self, base: LinkSpec) -> tuple[Step, ...]:
        """Every instant at which the link becomes another, in order; the first may be 0.

        LinkError when the changes make an impossible link at any time.
        """
        begins = sorted(self.changes, key=lambda change: change.at_s)
        instants = {one.at_s for one in begins} | {one.until_s for one in begins} - {math.inf}
        steps: list[Step] = []
        holding: list[Change] = []
        begun, last = 0, base
        for at_s in sorted(instants):
            holding = [one for one in holding if one.until_s > at_s]
            while begun < len(begins) and begins[begun].at_s <= at_s:
                holding += [begins[begun]] * (begins[begun].until_s > at_s)
                begun += 1
            spec = _changed(base, holding, at_s)
            if spec != last:
                steps.append(Step(at_s, spec, difference(last, spec)))
                last = spec
        return tuple(steps)


def outage(
    at_s: float,
    until_s: float,
    direction: Literal["both", "near_to_far", "far_to_near"] = "both",
) -> Change:
    """Every packet is lost."""
    return Change(at_s, until_s, direction, loss=OUTAGE_LOSS)


def diurnal(swing: float, period_s: float, until_s: float) -> tuple[Change, ...]:
    """The rate swings by +- ``swing`` (a fraction) about its value, a sine over ``period_s``.

    It starts at its value, rising; each step has the sine's value at its middle.
    """
    step_s = period_s / _DIURNAL_STEPS
    changes = []
    for index in range(math.ceil(until_s / step_s)):
        factor = 1 + swing * math.sin(2 * math.pi * (index + 0.5) / _DIURNAL_STEPS)
        changes.append(Change(index * step_s, (index + 1) * step_s, rate_factor=factor))
    return tuple(changes)


def microbursts(
    depth: float,
    min_duration_s: float,
    max_duration_s: float,
    every_s: float,
    until_s: float,
    seed: int,
) -> tuple[Change, ...]:
    """Bursts of other traffic that take ``depth`` (a fraction) of the rate away.

    Their durations are uniform, the gaps between them exponential with a mean that makes one begin
    every ``every_s`` on average.
    """
    random = Random(seed)
    mean_gap_s = every_s - (min_duration_s + max_duration_s) / 2
    changes = []
    at_s = random.expovariate(1 / mean_gap_s)
    while at_s < until_s:
        end_s = at_s + random.uniform(min_duration_s, max_duration_s)
        changes.append(Change(at_s, end_s, rate_factor=1 - depth))
        at_s = end_s + random.expovariate(1 / mean_gap_s)
    return tuple(changes)


def difference(before: LinkSpec, after: LinkSpec) -> str:
    """What of a link is another than before, in words."""
    ways = {}
    for name in DIRECTIONS:
        told = _differences(before.direction(name), after.direction(name))
        ways[name] = ", ".join(told)
    if ways["near_to_far"] == ways["far_to_near"]:
        return ways["near_to_far"] or "nothing"
    return "; ".join(f"{name.replace('_', ' ')} {told}" for name, told in ways.items() if told)


def _changed(base: LinkSpec, holding: Sequence[Change], at_s: float) -> LinkSpec:
    near_to_far, far_to_near = (
        _changed_direction(
            base.direction(name), [one for one in holding if one.direction in ("both", name)]
        )
        for name in DIRECTIONS
    )
    try:
        return replace(base, near_to_far=near_to_far, far_to_near=far_to_near)
    except LinkError as error:
        raise LinkError(f"at {format_duration_s(at_s)} of the schedule: {error}") from error


def _changed_direction(base: Direction, holding: Sequence[Change]) -> Direction:
    one, factor = base, 1.0
    for change in holding:
        factor *= change.rate_factor
        given = {name: getattr(change, name) for name in _REPLACED}
        one = replace(one, **{name: value for name, value in given.items() if value is not None})
    rate = max(MIN_RATE_BYTES_PER_S, one.rate_bytes_per_s * factor)
    return replace(one, rate_bytes_per_s=rate)


_REPLACED = ("rate_bytes_per_s", "delay_s", "jitter_s", "loss")


def _differences(before: Direction, after: Direction) -> list[str]:
    """The fields of a direction that are others, each with its old and its new value."""
    told = []
    for field in fields(Direction):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if old == new:
            continue
        match field.name:
            case "rate_bytes_per_s":
                told.append(f"rate {_rate(old)} to {_rate(new)}")
            case "delay_s" | "jitter_s":
                name = field.name.removesuffix("_s")
                told.append(f"{name} {_duration(old)} to {_duration(new)}")
            case "loss":
                told.append(f"loss {_share(before.loss_rate)} to {_share(after.loss_rate)}")
            case _:
                told.append(f"{field.name} {old} to {new}")
    return told


def _rate(value_bytes_per_s: float) -> str:
    return format_rate(float(f"{value_bytes_per_s * 8:.3g}") / 8)


def _duration(value_s: float) -> str:
    return format_duration_s(float(f"{value_s:.3g}"))


def _share(value: float) -> str:
    return format_fraction(float(f"{value:.3g}"))
