"""What a prefill instance computes in one step: several prompts together, long ones in parts.

A step takes requests in the order in which they wait, up to ``prefill_batch_tokens`` new tokens
together and ``chunk_tokens`` of each; the first one always has its part. Without a batch it is one
request, without chunks a prompt is taken whole, in its turn or not at all. What is not done after a
step goes to the end of the line, so that short prompts pass a long one between its chunks.

Its time follows from the profile's T(new, cached) of a prompt alone. With a_i and b_i the tokens of
request i that are computed before and after the step, k_i those that were cached, and F what a
step costs however little it computes:

    step_s = F + sum over i of (V(b_i, k_i) - V(a_i, k_i)),    V(n, k) = T(n, k) - F,  V(0, k) = 0

So a prompt alone and uncut takes T, m chunks take T + (m - 1) F, and m prompts together save
(m - 1) F. That is exact where T = F + alpha n + beta n^2, as matrix products over all tokens and
attention of each prompt over its own (Vidur, arXiv 2405.05465, adds the squares of the lengths of
a batch in the same way); a chunk attends to all before it, as b^2 - a^2 says. F is where the line
through the profile's two shortest prompts meets 0 tokens: never above the true fixed cost where the
curve bends upwards. Below the shortest prompt V goes to 0 in proportion.

Reading a prompt's KV again for each of its chunks costs nothing beside that. That is assumed: it
hides behind the compute of large chunks (thousands of tokens), and less and less behind small ones.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from harness.profile import Profile
from harness.settings import Serving
from harness.simulator.records import Live

#: (new_tokens, cached_tokens) -> seconds
PrefillTime = Callable[[int, int], float]


class Part(NamedTuple):
    """Of a request's new tokens those from ``begin`` up to ``end`` are computed."""

    live: Live
    begin: int
    end: int

    @property
    def is_last(self) -> bool:
        """Whether the prompt is done then."""
        return self.end == new_tokens(self.live)


def new_tokens(live: Live) -> int:
    """What the prefill of a request has to compute."""
    return live.input_tokens - live.cached_tokens


def steps_of(serving: Serving) -> "PrefillSteps | None":
    """None where every prompt is a step by itself."""
    if serving.prefill_batch_tokens is None and serving.chunk_tokens is None:
        return None
    return PrefillSteps(serving.prefill_batch_tokens, serving.chunk_tokens)


class PrefillSteps:
    """Chooses the parts of a step."""

    def __init__(self, batch_tokens: int | None, chunk_tokens: int | None) -> None:
        self._batch_tokens = batch_tokens
        self._chunk_tokens = chunk_tokens

    def choose(self, waiting: Iterable[Live], begins: Callable[[Live], bool]) -> list[Part]:
        """The parts of the next step. ``begins`` is asked of a request that would have its first
        part: where it says no for want of room, nobody behind it begins either."""
        parts: list[Part] = []
        left, may_begin = self._batch_tokens, True
        for live in waiting:
            if not live.started:
                may_begin = may_begin and self._fits(live, parts, left) and begins(live)
                if not may_begin and self._chunk_tokens is None:
                    break
                if not may_begin:
                    continue  # those behind it may have begun
            tokens = new_tokens(live) - live.computed_tokens
            if self._chunk_tokens is not None:
                tokens = min(tokens, self._chunk_tokens)
                if parts and left is not None:
                    tokens = min(tokens, left)
            parts.append(Part(live, live.computed_tokens, live.computed_tokens + tokens))
            if left is None:
                break
            left -= tokens
            if left <= 0:
                break
        return parts

    def _fits(self, live: Live, parts: Sequence[Part], left: int | None) -> bool:
        """Whether there is a place for some of it, or all of it where prompts stay whole."""
        if not parts or left is None or self._chunk_tokens is not None:
            return True
        return new_tokens(live) <= left


class StepCost:
    """The time of a step on one hardware, without fetches."""

    def __init__(self, profile: Profile, prefill_s: PrefillTime) -> None:
        self._prefill_s = prefill_s
        self._shortest = profile.covered_tokens[0]
        self.fixed_s = fixed_s(profile)

    def __call__(self, parts: Sequence[Part]) -> float:
        """Seconds."""
        first = parts[0]
        if len(parts) == 1 and first.begin == 0 and first.is_last:
            return self._prefill_s(first.end, first.live.cached_tokens)
        work_s = sum(
            self._work_s(end, live.cached_tokens) - self._work_s(begin, live.cached_tokens)
            for live, begin, end in parts
        )
        return self.fixed_s + work_s

    def _work_s(self, tokens: int, cached_tokens: int) -> float:
        """V: what the first so many new tokens take beside the fixed cost."""
        if tokens >= self._shortest:
            return self._prefill_s(tokens, cached_tokens) - self.fixed_s
        whole_s = self._prefill_s(self._shortest, cached_tokens) - self.fixed_s
        return whole_s * tokens / self._shortest


def fixed_s(profile: Profile) -> float:
    """F: the intercept of the line through the two shortest prompts, from 0 to the shorter's
    time."""
    level = min(point.cached_tokens for point in profile.prefill_points)
    points = sorted(
        (point.new_tokens, point.prefill_s)
        for point in profile.prefill_points
        if point.cached_tokens == level
    )
    (tokens, short_s), (more_tokens, longer_s) = points[:2]
    slope = (longer_s - short_s) / (more_tokens - tokens)
    return min(max(0.0, short_s - slope * tokens), short_s)
