"""The least of a function of one variable on [0, 1], coarse to fine, several at a time.

``POINTS`` inner points in each round; the next round lies between the neighbours of the best one.
Unlike a golden section it does not lose its way where neighbouring values are told apart by chance
alone, or where there are two valleys that the first round sees.
"""

from collections.abc import Callable, Sequence

#: Points of the first round, of each later one, and how many rounds.
POINTS, FINER_POINTS, ROUNDS = 9, 4, 3

#: Scores of points, which may each be of another function: (which function, where) -> score.
Score = Callable[[Sequence[tuple[int, float]]], Sequence[float]]


def minimise(score: Score, functions: int) -> list[tuple[float, float]]:
    """(where, score) of the least found of each function; all of a round are asked for at once."""
    known: list[dict[float, float]] = [{} for _ in range(functions)]
    gaps = [(0.0, 1.0)] * functions
    for number in range(ROUNDS):
        points = POINTS if number == 0 else FINER_POINTS
        wanted = [
            (which, where)
            for which, (low, high) in enumerate(gaps)
            for where in between(low, high, points)
            if where not in known[which]
        ]
        for (which, where), value in zip(wanted, score(wanted), strict=True):
            known[which][where] = value
        gaps = [around(one) for one in known]
    return [min(one.items(), key=lambda item: (item[1], item[0])) for one in known]


def between(low: float, high: float, points: int) -> list[float]:
    """``points`` inner points, alike far from each other."""
    return [low + (high - low) * (at + 1) / (points + 1) for at in range(points)]


def around(known: dict[float, float]) -> tuple[float, float]:
    """The neighbours of the best point; the ends of [0, 1] are points that are not asked for."""
    best = min(known.items(), key=lambda item: (item[1], item[0]))[0]
    below = max((where for where in known if where < best), default=0.0)
    above = min((where for where in known if where > best), default=1.0)
    return below, above
