"""Decoding one step at a time, written apart from the simulator."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class Decoded:
    """A request and its instants."""

    landed_s: float
    context: int
    output: int
    granted_s: float = -1.0
    second_s: float = -1.0
    finish_s: float = -1.0
    generated: int = 1


def decode_by_steps(
    rows: list[tuple[float, int, int]], slots: int, step_s: Callable[[int, float], float]
) -> list[Decoded]:
    """(landed_s, context, output) each, by landing; none lands just when a step ends."""
    everyone = [Decoded(*row) for row in rows]
    coming, waiting, active = list(everyone), list[Decoded](), list[Decoded]()

    def grant(now_s: float) -> None:
        while waiting and len(active) < slots:
            one = waiting.pop(0)
            one.granted_s = now_s
            if one.output > 1:
                active.append(one)
            else:
                one.finish_s = now_s

    def land() -> None:
        waiting.append(coming.pop(0))
        grant(waiting[-1].landed_s)

    now_s = 0.0
    while coming or active:
        if not active:
            now_s = coming[0].landed_s
            while coming and coming[0].landed_s == now_s:
                land()
            if not active:
                continue
        stepping = [one for one in active if one.granted_s < now_s] or list(active)
        contexts = [one.context + one.generated for one in stepping]
        now_s += step_s(len(stepping), sum(contexts) / len(contexts))
        while coming and coming[0].landed_s < now_s:
            land()
        for one in stepping:
            one.generated += 1
            if one.generated == 2:
                one.second_s = now_s
        for one in stepping:
            if one.generated == one.output:
                one.finish_s = now_s
                active.remove(one)
                grant(now_s)
    assert not waiting
    return everyone


def admit_by_memory(rows: list[tuple[float, float, int]], slots: int, blocks: int) -> list[float]:
    """When each is admitted, first come first served, of (landed_s, hold_s, blocks) by landing."""
    held: list[tuple[float, int]] = []  # end, blocks
    admitted: list[float] = []
    for landed_s, hold_s, needs in rows:
        earliest_s = max(landed_s, admitted[-1] if admitted else landed_s)
        for at_s in sorted({earliest_s, *(end for end, _ in held if end > earliest_s)}):
            still = [taken for end, taken in held if end > at_s]
            if len(still) < slots and sum(still) + needs <= blocks:
                admitted.append(at_s)
                held.append((at_s + hold_s, needs))
                break
    return admitted
