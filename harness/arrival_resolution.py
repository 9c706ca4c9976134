"""From the tables to the records of arrivals: closed or open loop, states, shapes of the rate.

``harness.workload_resolution`` has the rest of workload and load. Each function raises
ScenarioError, one paragraph that names the key; ``where`` names the file (and flags) in it.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from harness.resolution import missing, wrong
from harness.scenario_tables.offered import (
    ARRIVAL_KEYS,
    DiurnalTable,
    LoadTable,
    RateStateTable,
    ShapeTable,
    SpikeTable,
    WorkloadTable,
)
from harness.settings import RateShape, RateState

#: Changes of state a run may see: more would be noise that no queue notices.
_MAX_STATE_CHANGES = 1_000_000
_ON_OFF_KEYS = ("on_duration", "off_duration", "on_rate_multiple")
#: Pieces of a period's sine: the rate is off by (pi / 288)^2 / 2 of its swing at most.
_DIURNAL_PIECES = 288
_SHAPES = ("steps", "ramps", "spikes", "diurnal")


def check_loop(workload: WorkloadTable, load: LoadTable, where: str) -> None:
    """A closed loop has no rate, and so nothing that would shape one."""
    if load.concurrency is None:
        if load.think_time is not None:
            raise wrong("load.think_time", where, "it needs load.concurrency (a closed loop)")
        return
    closed = "with load.concurrency completions decide when a request leaves, so this key would "
    closed += "have no effect; remove it"
    if load.rate_req_per_s is not None:
        raise wrong("load.rate_req_per_s", where, closed)
    if useless := [key for key in ARRIVAL_KEYS if key in workload.model_fields_set]:
        raise wrong(f"workload.{useless[0]}", where, closed)
    if workload.trace is None and load.duration is not None:
        raise wrong("load.duration", where, f"{closed}, and give load.num_requests")
    if workload.trace is None and load.num_requests is None:
        raise missing("load.num_requests", where, "a closed loop ends with its last request")


def check_arrivals(workload: WorkloadTable, run_s: float, where: str) -> None:
    """The states and the shape of the rate, which the arrivals ask for or have no use for."""
    _check_on_off(workload, run_s, where)
    _check_states(workload, run_s, where)
    if workload.shape is not None:
        _check_shape(workload.shape, where)


def _check_on_off(workload: WorkloadTable, run_s: float, where: str) -> None:
    if workload.arrivals != "on_off":
        for key in _ON_OFF_KEYS:
            if getattr(workload, key) is not None:
                raise wrong(f"workload.{key}", where, 'it needs workload.arrivals = "on_off"')
        return
    for key in _ON_OFF_KEYS:
        if getattr(workload, key) is None:
            raise missing(f"workload.{key}", where, 'workload.arrivals = "on_off" needs it')
    on_s, off_s, multiple = (
        workload.on_duration,
        workload.off_duration,
        workload.on_rate_multiple,
    )
    assert on_s is not None
    assert off_s is not None
    assert multiple is not None
    most = (on_s + off_s) / on_s
    if multiple > most * (1 + 1e-9):
        raise wrong(
            "workload.on_rate_multiple",
            where,
            f"the on state lasts {on_s / (on_s + off_s):.3g} of the time, so at most {most:.6g} "
            "times the mean rate fits in it (no request arrives in the off state then)",
        )
    if run_s / (on_s + off_s) > _MAX_STATE_CHANGES:
        raise wrong("workload.on_duration", where, _too_many())


def _check_states(workload: WorkloadTable, run_s: float, where: str) -> None:
    if workload.arrivals != "mmpp":
        if workload.states is not None:
            raise wrong("workload.states", where, 'it needs workload.arrivals = "mmpp"')
        return
    if workload.states is None:
        raise missing("workload.states", where, 'workload.arrivals = "mmpp" needs it')
    if not any(state.rate_multiple for state in workload.states):
        raise wrong("workload.states", where, "no state has a rate; give one a rate_multiple")
    mean_s = sum(state.mean_duration for state in workload.states) / len(workload.states)
    if run_s / mean_s > 2 * _MAX_STATE_CHANGES:
        raise wrong("workload.states", where, _too_many())


def _too_many() -> str:
    return f"the run would change state more than {_MAX_STATE_CHANGES} times; make it longer"


def _check_shape(shape: ShapeTable, where: str) -> None:
    given = [name for name in _SHAPES if getattr(shape, name) is not None]
    if len(given) != 1:
        told = f"not {' and '.join(given)}" if given else "it has none"
        raise wrong("workload.shape", where, f"it takes one of {', '.join(_SHAPES)}; {told}")
    if shape.diurnal is not None:
        if shape.repeat is not None:
            raise wrong("workload.shape.repeat", where, "diurnal has a period of its own")
        return
    ends_s = _ends(shape)
    for before, after in pairwise(ends_s):
        if after <= before:
            raise wrong(
                f"workload.shape.{given[0]}",
                where,
                f"what is at {after:g} s does not come after what lasts until {before:g} s",
            )
    last_s = ends_s[-1]
    if shape.repeat is not None and last_s > shape.repeat:
        raise wrong(
            "workload.shape.repeat",
            where,
            f"it begins again after {shape.repeat:g} s, before all of it has been at {last_s:g} s",
        )
    if not any(point.multiple for point in shape.steps or shape.ramps or ()) and not shape.spikes:
        raise wrong(f"workload.shape.{given[0]}", where, "no point has a rate")


def _ends(shape: ShapeTable) -> list[float]:
    """Instants that have to ascend."""
    points = shape.steps or shape.ramps
    if points is not None:
        return [point.at for point in points]
    assert shape.spikes is not None
    found = []
    for spike in shape.spikes:
        found += [spike.at, spike.at + spike.lasts]
    return found


def resolve_states(states: list[RateStateTable] | None) -> tuple[RateState, ...]:
    return tuple(RateState(one.rate_multiple, one.mean_duration) for one in states or ())


def resolve_shape(shape: ShapeTable) -> RateShape:
    """The shape as multiples at instants, of a table that ``check_arrivals`` let pass."""
    if shape.diurnal is not None:
        return _diurnal(shape.diurnal)
    if shape.spikes is not None:
        return _spiked(shape.spikes, shape.repeat)
    points = shape.steps or shape.ramps
    assert points is not None
    return RateShape(
        time_s=tuple(point.at for point in points),
        multiples=tuple(point.multiple for point in points),
        linear=shape.ramps is not None,
        period_s=shape.repeat,
    )


def _spiked(spikes: Sequence[SpikeTable], repeat_s: float | None) -> RateShape:
    time_s, multiples = [0.0], [1.0]
    for spike in spikes:
        if spike.at == 0:
            time_s, multiples = [], []
        time_s += [spike.at, spike.at + spike.lasts]
        multiples += [spike.multiple, 1.0]
    return RateShape(tuple(time_s), tuple(multiples), linear=False, period_s=repeat_s)


def _diurnal(table: DiurnalTable) -> RateShape:
    places = [piece / _DIURNAL_PIECES for piece in range(_DIURNAL_PIECES + 1)]
    peak = table.peak_at / table.period
    return RateShape(
        time_s=tuple(place * table.period for place in places),
        # Rounded, so that every machine's cosine gives the same.
        multiples=tuple(
            round(1 + table.swing * math.cos(2 * math.pi * (place - peak)), 9) for place in places
        ),
        linear=True,
        period_s=table.period,
    )
