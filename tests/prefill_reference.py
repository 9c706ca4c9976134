"""Prefill in steps, written apart from the simulator: one token count after the other."""

from collections.abc import Callable


def prefill_by_steps(
    rows: list[tuple[float, int]],
    batch_tokens: int | None,
    chunk_tokens: int | None,
    fixed_s: float,
    alone_s: Callable[[int], float],
) -> list[tuple[float, float]]:
    """(start, end) of each of (arrival, tokens) at one instance, by arrival."""
    start: dict[int, float] = {}
    end: dict[int, float] = {}
    computed = dict.fromkeys(range(len(rows)), 0)
    line: list[int] = []
    coming = list(range(len(rows)))
    now_s = 0.0
    while len(end) < len(rows):
        while coming and (not line or rows[coming[0]][0] <= now_s):
            line.append(coming.pop(0))
            now_s = max(now_s, rows[line[-1]][0])
            if len(line) == 1:
                break  # it finds nobody there and begins alone
        step: dict[int, int] = {}
        for one in line:
            wants = rows[one][1] - computed[one]
            if chunk_tokens is not None:
                wants = min(wants, chunk_tokens)
            has = sum(step.values())
            if step and batch_tokens is None:
                break
            if step and batch_tokens is not None and has + wants > batch_tokens:
                if chunk_tokens is None or has >= batch_tokens:
                    break
                wants = batch_tokens - has
            step[one] = wants
        took_s = fixed_s
        for one, tokens in step.items():
            before, after = computed[one], computed[one] + tokens
            took_s += alone_s(after) - (alone_s(before) if before else fixed_s)
            start.setdefault(one, now_s)
        now_s += took_s
        # Who came meanwhile stands before those who have had their turn.
        while coming and rows[coming[0]][0] <= now_s:
            line.append(coming.pop(0))
        line = [one for one in line if one not in step]
        for one, tokens in step.items():
            computed[one] += tokens
            if computed[one] == rows[one][1]:
                end[one] = now_s
            else:
                line.append(one)
    return [(start[one], end[one]) for one in range(len(rows))]
