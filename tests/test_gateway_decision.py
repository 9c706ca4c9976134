"""The benchmark of one decision places requests that find something; its times are not judged."""

from benchmarks.gateway_decision import (
    CACHED_BLOCKS,
    CLUSTERS,
    INPUT_TOKENS,
    configuration,
    measure,
)


def test_it_places_prompts_with_hits_among_many_clusters() -> None:
    assert len({one.cluster for one in configuration().instances}) == CLUSTERS
    timings = measure(20)
    assert timings.cached_blocks >= CACHED_BLOCKS
    assert len(timings.wall_s) == len(timings.cpu_s) == 20
    assert min(timings.wall_s) > 0
    assert 0 < max(timings.hit_tokens) < INPUT_TOKENS
