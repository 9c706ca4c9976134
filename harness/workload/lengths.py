"""What lengths a workload has, as planners take it: quantiles of a law, or those of a schedule."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.core import ScenarioError
from harness.scenario import Scenario
from harness.settings import Prefix
from harness.trace import unlimited_cache_tokens
from harness.workload.generation import build_schedule, trace_part
from harness.workload_resolution import input_law, output_law

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Midpoints that stand for a continuous law in ``length_distribution``, in every search alike; few
#: enough that each is tried as a threshold (``harness.throughput``).
STRATA = 4000


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Uncached prompt lengths, the cached prefix with each, their probabilities. # (points,)"""

    lengths: FloatArray
    weights: FloatArray
    mean_output_tokens: float
    cached_tokens: FloatArray


def length_distribution(scenario: Scenario, strata: int = STRATA) -> LengthDistribution:
    """What lengths the workload has: midpoint quantiles of its law, or those of its trace or, with
    sessions, of its schedule.

    ``strata`` midpoints stand for a law. Cached prefixes as ``scenario.prefix`` says; at least one
    token of a prompt is always new.
    """
    prefix, workload = scenario.prefix, scenario.workload
    if workload.trace is not None:
        part = trace_part(workload, scenario.load)
        where = f"the trace file {part.path}"
        return _of(part.input_tokens, part.output_tokens, part.hash_ids, prefix, where)
    if workload.sessions is not None:
        turns = build_schedule(workload, scenario.load)
        chains = [one.hash_ids for one in turns] if prefix.model == "trace" else ()
        where = f"the scenario file {scenario.path}"
        return _of(turns.input_tokens, turns.output_tokens, chains, prefix, where)
    if prefix.model == "trace":
        raise ScenarioError(
            f"The value of 'prefix.model' in the scenario file {scenario.path} is wrong: there is "
            'no trace whose prefixes could be counted; give workload.trace or --trace, or "share".'
        )
    midpoints = (np.arange(strata) + 0.5) / strata
    total = input_law(workload).quantile(midpoints)
    output_tokens = float(output_law(workload).quantile(midpoints).mean())
    sides = _prefix_sides(total, prefix)
    return LengthDistribution(
        lengths=np.concatenate([total - cached for _, cached in sides]),
        weights=np.concatenate([np.full(strata, share / strata) for share, _ in sides]),
        mean_output_tokens=output_tokens,
        cached_tokens=np.concatenate([cached for _, cached in sides]),
    )


def _of(
    inputs: IntArray,
    outputs: IntArray,
    chains: Sequence[tuple[int, ...]],
    prefix: Prefix,
    where: str,
) -> LengthDistribution:
    """Each distinct (new, cached) once, by new tokens; with a share of agents both variants."""
    total = inputs.astype(np.float64)
    if prefix.model == "trace" and not any(chains):
        raise ScenarioError(
            "The value of 'prefix.model' is wrong: \"trace\" counts cached prefixes by hash ids, "
            f"of which {where} has none; give a trace that has them (Mooncake), "
            'or prefix.model = "share".'
        )
    if prefix.model == "trace":
        sides = [(1.0, np.minimum(unlimited_cache_tokens(chains), total - 1))]
    else:
        sides = _prefix_sides(total, prefix)
    pairs = np.concatenate([(total - cached) + 1j * cached for _, cached in sides])
    weights = np.concatenate([np.full(len(total), share / len(total)) for share, _ in sides])
    distinct, place = np.unique(pairs, return_inverse=True)
    return LengthDistribution(
        lengths=distinct.real,
        weights=np.bincount(place, weights).astype(np.float64),
        mean_output_tokens=float(outputs.mean()),
        cached_tokens=distinct.imag,
    )


def _prefix_sides(total: FloatArray, prefix: Prefix) -> list[tuple[float, FloatArray]]:
    """(share of the requests, their cached tokens), only of sides that there are."""
    agents = prefix.agent_share if prefix.model == "share" else 0.0
    cached = np.minimum(total * prefix.cached_fraction, total - 1)
    sides = [(1 - agents, np.zeros(len(total))), (agents, cached)]
    return [(share, found) for share, found in sides if share > 0]
