"""When KV is released during a prefill: which share of the bytes is final after which share of it.

Our workers report when each layer was final, so a curve is the layers' cumulative bytes against
their times, medians over requests. SGLang sends KV chunk by chunk, of ``--chunked-prefill-size``
tokens, and reports no chunk's end (0.5.23: ``meta_info`` has the start and the end of the whole
prefill), so nothing can be captured there, and the profile says so.
"""

from collections.abc import Sequence
from itertools import accumulate
from statistics import median

from harness.architecture import Architecture
from harness.profile_measurement import ReleaseFile
from harness.profiler.prompts import Prompts
from harness.profiler.target import Target

REQUESTS = 5
NOT_REPORTED = (
    "release times were asked for, but the engine does not report when layers or chunks are final"
)


async def capture(
    target: Target, prompts: Prompts, architecture: Architecture, lengths: Sequence[int]
) -> list[ReleaseFile]:
    """A curve for each length; empty where the engine does not report."""
    curves = []
    for tokens in lengths:
        shares = []
        for _ in range(REQUESTS):
            got = await target.prefill(prompts.fresh(tokens))
            if not got.layer_shares:
                return []
            shares.append(got.layer_shares)
        curves.append(release_curve(architecture.layer_kv_bytes(tokens), shares, tokens))
    return curves


def release_curve(
    layer_bytes: Sequence[int], shares: Sequence[Sequence[float]], tokens: int
) -> ReleaseFile:
    """One curve of several requests' layer times, each a share of its own prefill."""
    total = sum(layer_bytes)
    times = [median(one) for one in zip(*shares, strict=True)]
    # A late wake-up may put a time beyond the planned end; the last layer ends the prefill.
    ascending = list(accumulate((min(max(time, 0.0), 1.0) for time in times), max))
    ascending[-1] = 1.0
    sums = [done / total for done in accumulate(layer_bytes)]
    sums[-1] = 1.0
    return ReleaseFile(
        new_tokens=tokens,
        byte_shares=[round(share, 9) for share in sums],
        time_shares=[round(share, 6) for share in ascending],
        samples=len(shares),
        source="layers as the worker reports them",
    )
