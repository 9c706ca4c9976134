"""What a scenario says that the equations do not take in, in words.

They know a link by its rate and its delays, and capacity by what a stage does while it is busy. A
simulation takes in more of it (``harness.simulator``): each sentence says what it leaves out too.
Who reads a throughput or a TTFT has to know what else the scenario asked for.
"""

from collections.abc import Callable

from harness.scenario import Scenario
from netem.link import Direction


def left_out(scenario: Scenario) -> tuple[str, ...]:
    """A sentence for each; empty for a scenario that is taken as it is."""
    return (*_of_the_link(scenario), *_of_admission(scenario))


def _of_the_link(scenario: Scenario) -> list[str]:
    link = scenario.link
    told: list[str] = []
    if not any(one.num_prfaas for one in scenario.deployments.values()):
        return told
    cap = link.per_flow_cap_bytes_per_s
    if cap is not None:
        connections = scenario.transport.connections
        told.append(
            f"link.per_flow_cap is not in Lambda_max or TTFT, which, unlike a simulation, take the "
            f"whole link.rate of {_gbit(link.rate_bytes_per_s)} for a transfer: its "
            f"{connections} connections carry at most "
            f"{_gbit(min(connections * cap, link.rate_bytes_per_s))}."
        )
    pacing = scenario.transport.pacing_bytes_per_s
    if pacing is not None and pacing < link.rate_bytes_per_s:
        told.append(
            f"transport.pacing is not in Lambda_max or TTFT, which, unlike a simulation, let a "
            f"transfer use the whole link.rate of {_gbit(link.rate_bytes_per_s)}: an instance "
            f"sends another at most {_gbit(pacing)}."
        )
    ways = (link.near_to_far, link.far_to_near)
    if impaired := [name for name, has in _IMPAIRMENTS.items() if any(has(way) for way in ways)]:
        told.append(
            f"{', '.join(f'link.{name}' for name in impaired)}: not in Lambda_max or TTFT, which "
            "take a link that delivers at its rate, in order, after its delay; a simulation knows "
            "what loss leaves of a connection's rate, and what else TCP makes of the real one only "
            "a live run shows."
        )
    if scenario.link_schedule is not None:
        told.append(
            "the link's changes during a run are not in Lambda_max or a planned TTFT, which take "
            "it as it starts; a simulation follows them."
        )
    return told


#: Properties of a direction that queues of bytes do not know, by their keys.
_IMPAIRMENTS: dict[str, Callable[[Direction], bool]] = {
    "loss": lambda way: way.loss is not None and way.loss_rate > 0,
    "jitter": lambda way: way.jitter_s > 0,
    "reorder": lambda way: way.reorder > 0,
    "duplicate": lambda way: way.duplicate > 0,
    "corrupt": lambda way: way.corrupt > 0,
    "slot": lambda way: way.slot is not None,
}


def _of_admission(scenario: Scenario) -> list[str]:
    if scenario.scheduling.admission != "reserve_first":
        return []
    deadline_s = scenario.scheduling.admission_deadline_s
    return [
        "scheduling.admission = reserve_first: Lambda_max is an upper bound. A decode slot counts "
        "as held through prefill and transfer, but not through a wait in the prefill queue, and a "
        f"request that gets none within scheduling.admission_deadline ({deadline_s:g} s) fails, "
        "which no equation counts."
    ]


def _gbit(rate_bytes_per_s: float) -> str:
    return f"{rate_bytes_per_s * 8e-9:.3g} Gbit/s"
