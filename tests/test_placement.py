"""Where a request goes when caches hold part of its prompt, and with which switches."""

import pytest
from scheduler_setup import (
    BLOCK,
    STATE_BYTES,
    TOKEN_BYTES,
    busy_link,
    cached,
    config,
    growing_bytes,
    moved_bytes,
    place,
)

from harness.core import PD, PRFAAS
from harness.scheduling import events as ev
from harness.scheduling.scheduler import Scheduler

KEYS = tuple(range(1, 21))  # of a prompt of 20 blocks and a bit
TOKENS = 20 * BLOCK + 5
LOCAL = {"num_prefill": 3, "num_decode": 2, "cache": True}
BOTH = {"num_prfaas": 2, "num_prefill": 2, "threshold_tokens": 150, "cache": True}


def test_the_holder_of_a_prefix_computes_only_the_rest() -> None:
    scheduler = Scheduler(config(**LOCAL))
    cached(scheduler, "pd-p2", *KEYS[:8])
    dispatch = place(scheduler, "a", 0.0, TOKENS, keys=KEYS)
    assert dispatch.route.prefill.name == "pd-p2"
    assert dispatch.cached_tokens == dispatch.resident_tokens == 8 * BLOCK
    assert dispatch.hit_tokens == {PD: 8 * BLOCK}
    assert (dispatch.fetched_tokens, dispatch.fetch_from, dispatch.fetch_s) == (0, None, 0.0)
    assert dispatch.prefill_service_s == (TOKENS - 8 * BLOCK) / 32


def test_one_token_is_always_computed() -> None:
    scheduler = Scheduler(config(**LOCAL))
    cached(scheduler, "pd-p0", *KEYS, states=KEYS)
    dispatch = place(scheduler, "a", 0.0, 8 * BLOCK, keys=KEYS[:8])
    assert dispatch.cached_tokens == 7 * BLOCK


def test_a_busy_holder_is_passed_over_by_one_that_fetches_and_the_prefix_spreads() -> None:
    scheduler = Scheduler(config(**LOCAL, moved=growing_bytes))
    cached(scheduler, "pd-p0", *KEYS[:8])
    names = [place(scheduler, str(n), 0.0, TOKENS, keys=KEYS).route.prefill.name for n in range(3)]
    assert names == ["pd-p0", "pd-p1", "pd-p2"]
    # The two that fetched it report that they hold it; then nobody fetches any more.
    cached(scheduler, "pd-p1", *KEYS[:8])
    cached(scheduler, "pd-p2", *KEYS[:8])
    again = [place(scheduler, f"b{n}", 0.0, TOKENS, keys=KEYS) for n in range(3)]
    assert {one.fetched_tokens for one in again} == {0}
    assert {one.route.prefill.name for one in again} == {"pd-p0", "pd-p1", "pd-p2"}


def test_a_fetch_takes_its_time_over_the_fabric() -> None:
    scheduler = Scheduler(config(**LOCAL, fabric_bytes_per_s=2.0**12))
    cached(scheduler, "pd-d1", *KEYS[:8])  # a decode instance holds it, so it must be fetched
    dispatch = place(scheduler, "a", 0.0, TOKENS, keys=KEYS)
    assert (dispatch.fetch_from, dispatch.fetched_tokens) == ("pd-d1", 8 * BLOCK)
    assert dispatch.fetch_s == (8 * BLOCK * TOKEN_BYTES + STATE_BYTES) / 2.0**12
    computing_s = (TOKENS - 8 * BLOCK) / 32
    assert dispatch.prefill_service_s == pytest.approx(dispatch.fetch_s + computing_s)


def test_only_the_state_is_fetched_where_the_blocks_are_held() -> None:
    scheduler = Scheduler(config(**{**LOCAL, "num_prefill": 1}, fabric_bytes_per_s=2.0**12))
    cached(scheduler, "pd-p0", *KEYS[:8], states=())
    cached(scheduler, "pd-d0", *KEYS[:4], KEYS[7], states=(KEYS[3], KEYS[7]))
    dispatch = place(scheduler, "a", 0.0, TOKENS, keys=KEYS)
    assert dispatch.cached_tokens == 8 * BLOCK
    assert (dispatch.fetched_tokens, dispatch.fetch_s) == (0, STATE_BYTES / 2.0**12)


def test_a_loaded_holder_of_a_long_prefix_beats_an_idle_one_while_a_fetch_is_slower() -> None:
    """2 s of fetching against 1.5 s of queue."""
    scheduler = Scheduler(config(**LOCAL, moved=growing_bytes, fabric_bytes_per_s=2.0**12))
    place(scheduler, "other", 0.0, 48)
    cached(scheduler, "pd-p0", *KEYS[:8])
    assert place(scheduler, "a", 0.0, TOKENS, keys=KEYS).route.prefill.name == "pd-p0"
    second = place(scheduler, "b", 0.0, TOKENS, keys=KEYS)
    assert (second.route.prefill.name, second.fetch_s) == ("pd-p1", 2.0)
    assert second.considered_s == {
        "pd-p1": pytest.approx(2 + (TOKENS - 8 * BLOCK) / 32),
        "pd-p0": pytest.approx(1.5 + 2 * (TOKENS - 8 * BLOCK) / 32),
    }


def test_what_an_instance_holds_itself_may_be_quicker_than_a_fetch() -> None:
    scheduler = Scheduler(config(**{**LOCAL, "num_prefill": 1}, fabric_bytes_per_s=256.0))
    cached(scheduler, "pd-d0", *KEYS[:8])
    cached(scheduler, "pd-p0", *KEYS[:4])
    dispatch = place(scheduler, "a", 0.0, TOKENS, keys=KEYS)
    assert (dispatch.cached_tokens, dispatch.fetch_s, dispatch.fetch_from) == (4 * BLOCK, 0, None)
    assert dispatch.prefill_service_s == (TOKENS - 4 * BLOCK) / 32
    # The decode instance's blocks need not move.
    assert dispatch.resident_tokens == 8 * BLOCK


def test_with_bandwidth_to_spare_the_best_prefix_anywhere_counts_and_is_copied() -> None:
    scheduler = Scheduler(config(**BOTH))
    cached(scheduler, "prfaas-p1", *KEYS[:16])
    dispatch = place(scheduler, "a", 0.0, TOKENS, keys=KEYS)
    # l = 69 tokens: local, and the prefix comes across because that is quicker.
    assert dispatch.uncached_tokens == TOKENS - 16 * BLOCK
    assert dispatch.route.prefill.cluster == PD
    assert dispatch.copy == ev.CopyPrefix(
        "prfaas-p1", dispatch.route.prefill.name, 16 * BLOCK, moved_bytes(16 * BLOCK, 0)
    )
    assert dispatch.cached_tokens == dispatch.resident_tokens == 16 * BLOCK
    assert dispatch.copy_s == pytest.approx(moved_bytes(16 * BLOCK, 0) / 2.0**20)
    computing_s = (TOKENS - 16 * BLOCK) / 32
    assert dispatch.prefill_service_s == pytest.approx(dispatch.copy_s + computing_s)


def test_a_prefix_goes_to_prfaas_when_the_rest_is_long() -> None:
    scheduler = Scheduler(config(**BOTH))
    cached(scheduler, "pd-d0", *KEYS[:8])
    cached(scheduler, "prfaas-p0", *KEYS[:4])
    dispatch = place(scheduler, "a", 0.0, TOKENS, keys=KEYS)
    assert dispatch.route.prefill.name == "prfaas-p0"
    assert dispatch.copy is not None
    assert (dispatch.copy.source, dispatch.copy.tokens) == ("pd-d0", 8 * BLOCK)
    assert dispatch.copy.kv_bytes == moved_bytes(8 * BLOCK, 4 * BLOCK)
    # What the PD cluster holds does not come back with the rest.
    assert dispatch.resident_tokens == 8 * BLOCK


def test_a_copy_that_is_slower_than_computing_is_not_made() -> None:
    scheduler = Scheduler(config(**BOTH, link_bytes_per_s=2.0**10))
    cached(scheduler, "prfaas-p1", *KEYS[:16])
    dispatch = place(scheduler, "a", 0.0, TOKENS, keys=KEYS)
    assert (dispatch.route.prefill.cluster, dispatch.copy) == (PD, None)
    assert (dispatch.cached_tokens, dispatch.prefill_service_s) == (0, TOKENS / 32)


def test_a_prefix_in_pieces_is_not_copied() -> None:
    scheduler = Scheduler(config(**BOTH))
    cached(scheduler, "prfaas-p0", *KEYS[:8])
    cached(scheduler, "prfaas-p1", *KEYS[8:16])
    dispatch = place(scheduler, "a", 0.0, TOKENS, keys=KEYS)
    assert dispatch.hit_tokens == {PRFAAS: 16 * BLOCK, PD: 0}
    assert dispatch.copy is None


@pytest.mark.parametrize("off", ["scarce", "cache_copy", "bandwidth_aware"])
def test_without_bandwidth_to_spare_only_the_local_prefix_counts(off: str) -> None:
    switches = {} if off == "scarce" else {off: False}
    scheduler = Scheduler(config(**BOTH, **switches))
    if off == "scarce":
        busy_link(scheduler, PRFAAS, 5.0)
    cached(scheduler, "prfaas-p1", *KEYS[:16])
    cached(scheduler, "pd-p1", *KEYS[:4])
    dispatch = place(scheduler, "a", 5.0, TOKENS, keys=KEYS)
    assert dispatch.link_scarce == (off == "scarce")
    assert dispatch.uncached_tokens == TOKENS - 4 * BLOCK
    # PrfaaS computes, with the longer prefix of its own and no copy.
    assert dispatch.route.prefill.name == "prfaas-p1"
    assert (dispatch.cached_tokens, dispatch.copy) == (16 * BLOCK, None)
    assert dispatch.resident_tokens == 4 * BLOCK


@pytest.mark.parametrize("off", ["cache_aware", "cache"])
def test_blind_placement_is_that_without_a_cache(off: str) -> None:
    blind, plain = (Scheduler(config(**{**BOTH, off: False})) for _ in range(2))
    for name in ("prfaas-p1", "pd-p1"):
        assert blind.handle(ev.CacheDelta(name, 1, KEYS, (), KEYS), 0.0) == []
    for number in range(6):
        found = place(blind, str(number), 0.0, TOKENS, keys=KEYS)
        assert found == place(plain, str(number), 0.0, TOKENS)
        assert found.hit_tokens == {}
    assert blind.cached_blocks == 0


def test_a_pool_that_went_down_holds_nothing_until_it_is_known_again() -> None:
    scheduler = Scheduler(config(**LOCAL))
    cached(scheduler, "pd-p0", *KEYS[:8])
    scheduler.handle(ev.InstanceDown("pd-p0"), 1.0)
    assert place(scheduler, "a", 1.0, TOKENS, keys=KEYS).cached_tokens == 0
    assert scheduler.handle(ev.InstanceUp("pd-p0"), 2.0) == [ev.Resync("pd-p0")]
    assert scheduler.handle(ev.CacheSnapshot("pd-p0", 7, KEYS[:2], KEYS[:2]), 2.0) == []
    assert place(scheduler, "b", 2.0, TOKENS, keys=KEYS).cached_tokens == 2 * BLOCK


def test_a_missed_report_is_asked_for() -> None:
    scheduler = Scheduler(config(**LOCAL))
    cached(scheduler, "pd-p0", *KEYS[:8])
    missed = ev.CacheDelta("pd-p0", 3, KEYS[8:9])
    assert scheduler.handle(missed, 1.0) == [ev.Resync("pd-p0")]
    assert place(scheduler, "a", 1.0, TOKENS, keys=KEYS).cached_tokens == 0


def test_several_clusters_each_with_its_own_prefix() -> None:
    scheduler = Scheduler(config(1, 1, 1, clusters=3, threshold_tokens=150, cache=True))
    cached(scheduler, "pd2-p0", *KEYS[:12])
    near = place(scheduler, "a", 0.0, TOKENS, keys=KEYS)
    assert (near.route.prefill.name, near.route.decode.name) == ("pd2-p0", "pd2-d0")
    # What PrfaaS computes is finished where most of it lies, by the first that is free.
    cached(scheduler, "pd1-d0", *range(101, 105))
    far = [place(scheduler, f"b{n}", 0.0, TOKENS, keys=tuple(range(101, 121))) for n in range(3)]
    assert [one.route.prefill.cluster for one in far] == ["prfaas", "prfaas1", "prfaas2"]
    assert {one.route.decode.cluster for one in far} == {"pd1"}
    assert {one.resident_tokens for one in far} == {4 * BLOCK}
