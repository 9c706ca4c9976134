"""Does the profiler read back what is known? Repetitions against a live emulated worker. JSON.

    python -m benchmarks.profiler_coverage [--repetitions 100] [--noise-cv 0.02] [--interval 0.5%]

A worker with several pairs of a prefill and a decode instance, whose costs and noise are stated, is
measured by the profiler's own visits, warm-up and stopping rule; every repetition is a measurement
of its own. Repetitions run side by side, one a pair: emulated instances only wait. For each point:
in how many repetitions the 95 % interval covers the truth, and the largest error of a mean. At a
true 95 % a count of 100 lies within 90 to 99 in 98 cases of 100.

T_prefill is read from inside, as a profile has it, and beside it from outside, whose difference is
HTTP and wake-ups: that one is the machine's. T_decode is seen from outside alone. Time scale 1. A
repetition that the machine disturbs may not reach its bound within ``--budget``; it counts with the
interval that it has, and ``unfinished`` says how many did so.
"""

import argparse
import asyncio
import json
import math
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.profiler_worker import known_pairs, write_known_profile
from harness.profile import Profile
from harness.profiler.campaign import Campaign, Visit, visit_means
from harness.profiler.decode import DecodeVisits
from harness.profiler.estimate import Estimate, estimate
from harness.profiler.gpu import Gpus
from harness.profiler.plan import Cell, Kind
from harness.profiler.prefill import PrefillVisits
from harness.profiler.prompts import Prompts
from harness.profiler.samples import Sample, SampleFile
from harness.profiler.target import Pair
from netem.units import parse_fraction

CELLS = (
    Cell("prefill", 256),
    Cell("prefill", 2048),
    Cell("decode", batch=1, context_tokens=512),
    Cell("decode", batch=4, context_tokens=2048),
)
WITHIN, COVERED = 0.01, (90, 99)


@dataclass(frozen=True, slots=True)
class Repetition:
    """One measurement of every cell."""

    estimates: dict[Cell, Estimate]
    outside_s: dict[Cell, float]


def _silent(_cell: Cell | None, _done: int, _left: int) -> None:
    """Nobody watches."""


async def repetition(
    pair: Pair,
    folder: Path,
    number: int,
    cells: tuple[Cell, ...],
    bound: float,
    budget_wall_s: float,
) -> Repetition:
    """As ``prfaas profile`` measures, on one pair."""
    file = SampleFile(folder / f"r{number}", {"repetition": number})
    prompts, gpus = Prompts(f"coverage {number}"), Gpus(wanted=False)
    visits: dict[Kind, Visit] = {
        "prefill": PrefillVisits(pair, prompts, gpus, 1, from_inside=True),
        "decode": DecodeVisits(pair, prompts, gpus, 1, None),
    }
    deadline_s = time.monotonic() + budget_wall_s
    campaign = Campaign(pair, cells, visits, file, bound, number, 1, deadline_s, _silent)
    await campaign.run()
    assert not campaign.given_up, campaign.given_up
    found = {cell: estimate(v, bound) for cell, v in visit_means(file.samples, cells).items()}
    return Repetition(found, _outside(file.samples))


def _outside(samples: list[Sample]) -> dict[Cell, float]:
    told = [one for one in samples if one.used and one.outside_s is not None]
    return {
        cell: fmean(one.outside_s or 0.0 for one in told if one.cell == cell)
        for cell in {one.cell for one in told}
    }


def truth_s(profile: Profile, cell: Cell) -> float:
    """What the worker's costs say."""
    if cell.kind == "prefill":
        return profile.prefill_s(cell.new_tokens)
    return profile.decode_step_s(cell.batch, cell.context_tokens)


async def measured(
    repetitions: int,
    noise_cv: float,
    bound: float,
    pairs: int,
    seed: int,
    cells: tuple[Cell, ...] = CELLS,
    budget_wall_s: float = 300.0,
) -> list[dict[str, Any]]:
    """A row a cell."""
    with tempfile.TemporaryDirectory(prefix="profiler-coverage-") as name:
        folder = Path(name)
        profile = write_known_profile(folder / "known.json")
        numbers = iter(range(repetitions))
        found: list[Repetition] = []

        async def keep(pair: Pair) -> None:
            for number in numbers:
                one = await repetition(pair, folder, number, cells, bound, budget_wall_s)
                found.append(one)

        async with (
            known_pairs(folder, profile.path, pairs, noise_cv, seed) as targets,
            asyncio.TaskGroup() as group,
        ):
            for one in targets:
                group.create_task(keep(one))
        return [row(cell, truth_s(profile, cell), found) for cell in cells]


def row(cell: Cell, truth: float, found: list[Repetition]) -> dict[str, Any]:
    """What the repetitions of one cell came to."""
    estimates = [one.estimates[cell] for one in found]
    errors = [one.mean / truth - 1 for one in estimates]
    covered = sum(
        one.low is not None and one.high is not None and one.low <= truth <= one.high
        for one in estimates
    )
    outside = [one.outside_s[cell] / truth - 1 for one in found if cell in one.outside_s]
    share = covered / len(found)
    return {
        "point": cell.label,
        "truth_s": truth,
        "repetitions": len(found),
        "unfinished": sum(not one.is_tight for one in estimates),
        "covered": covered,
        "covers_90_to_99_of_100": COVERED[0] <= 100 * share <= COVERED[1],
        "largest_error": max(map(abs, errors)),
        "within_1_percent": max(map(abs, errors)) <= WITHIN,
        "mean_error": fmean(errors),
        "standard_error": math.sqrt(fmean(e * e for e in errors) / len(errors)),
        "visits_median": median(one.samples for one in estimates),
        "outside_error_median": median(outside) if outside else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=100)
    parser.add_argument("--noise-cv", type=float, default=0.02)
    parser.add_argument("--interval", default="0.5%")
    parser.add_argument("--pairs", type=int, default=10, help="repetitions side by side")
    parser.add_argument("--budget", type=float, default=300.0, help="wall seconds of a repetition")
    parser.add_argument("--kind", choices=("prefill", "decode"), help="one kind of points only")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="the only output there is")
    given = parser.parse_args()
    began_s, load = time.monotonic(), os.getloadavg()[0]
    rows = asyncio.run(
        measured(
            given.repetitions, given.noise_cv, parse_fraction(given.interval), given.pairs,
            given.seed, tuple(c for c in CELLS if given.kind in (None, c.kind)), given.budget,
        )
    )  # fmt: skip
    told = {
        "noise_cv": given.noise_cv,
        "interval": given.interval,
        "points": rows,
        "meets_target": all(r["covers_90_to_99_of_100"] and r["within_1_percent"] for r in rows),
        "wall_s": round(time.monotonic() - began_s, 1),
        "cores": os.cpu_count(),
        "load_average_before": round(load, 2),
    }
    print(json.dumps(told, indent=2))


if __name__ == "__main__":
    main()
