"""What benchmarks/transfer_exposure.py asks and tells; docs/transfer-model.md has its figures."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.transfer_exposure import compared, summary
from benchmarks.transfer_exposure_cases import LINKS, PREFILLS, SENDING_S, Row, hybrid, rows_of
from benchmarks.transfer_exposure_ends import Played, open_ends
from harness.transfer_rate import link_path, payload_bytes_per_s
from netem.link import symmetric
from netem.testlink import open_link

ROWS = [row for link in LINKS for row in rows_of(link, cold=False)]


def test_the_rows_are_long_enough_and_not_all_bound_by_an_end() -> None:
    """Noise of milliseconds is small against each; some piece in the middle decides in some."""
    critical = set()
    for row in ROWS:
        link = LINKS[row.link]
        model = row.modelled(link)
        assert float(model.exposed_s) >= 0.2, row
        assert float(model.sending_s) == pytest.approx(SENDING_S, rel=1e-3)
        if row.layerwise:
            critical.add((row.kda_per_mla, row.prefill.name, int(model.critical)))
    assert len({piece for _, _, piece in critical}) >= 4
    assert all(piece > 0 for _, _, piece in critical)


def test_patterns_have_their_layers() -> None:
    for kda_per_mla in (3, 5, 7):
        kinds = [layer.kind for layer in hybrid(kda_per_mla).layers]
        assert len(kinds) == 24
        assert kinds.count("kda") == kda_per_mla * kinds.count("mla")
        assert kinds[-1] == "mla"


@pytest.mark.parametrize("layerwise", [True, False])
def test_a_play_is_what_is_modelled(layerwise: bool) -> None:
    """The pieces that move, in order; the state only in the last, short chunk."""
    link = LINKS["near"]
    row = Row("near", 4, 5, PREFILLS[1], layerwise)
    play = row.play(link)
    rate = payload_bytes_per_s(link_path(link), row.flows(link))
    assert sum(play["sizes_bytes"]) == pytest.approx(rate * SENDING_S, abs=1)
    assert len(play["sizes_bytes"]) == 4 + 4 + 24, "MLA layers only in the first two chunks"
    assert play["release_s"] == sorted(play["release_s"])
    assert play["release_s"][-1] == row.prefill.prefill_s
    assert (play["release_s"][0] < row.prefill.prefill_s) is layerwise
    last = sum(
        size
        for size, release_s in zip(row.play(link)["sizes_bytes"], play["release_s"], strict=True)
        if release_s >= row.prefill.prefill_s
    )
    assert (last == sum(play["sizes_bytes"])) is not layerwise


def test_a_row_far_from_the_model_is_told_as_such() -> None:
    link, row = LINKS["far"], Row("far", 1, 3, PREFILLS[0], layerwise=True)
    exposed_s = float(row.modelled(link).exposed_s)
    end_s = row.prefill.prefill_s + exposed_s

    def rows(*shares: float) -> list[dict[str, object]]:
        played = [Played(end_s + share * exposed_s, end_s + 1, 0.0, 0) for share in shares]
        return [compared(row, link, played)]

    near, off = rows(0.0, 0.09, 5.0), rows(0.2, 0.3, 0.1)
    assert near[0]["ratio"] == pytest.approx(1.09), "the median"
    assert summary(near)["meets_target"] is True
    assert off[0]["ratio"] == pytest.approx(1.2)
    assert summary([*near, *off])["within_10_percent"] == 1
    assert summary(off)["meets_target"] is False
    json.dumps(near, allow_nan=False)


def test_no_byte_arrives_before_the_prefill_ends() -> None:
    """Live, over the relay, which every machine can build: the ends play what they are told."""
    row = Row("quick", 2, 3, replace(PREFILLS[1], prefill_s=0.05), layerwise=True)
    with open_link(symmetric("quick", 1e9, 0.0), "relay") as link, open_ends(link, None) as ends:
        play = row.play(LINKS["near"])
        play["sizes_bytes"] = [math.ceil(size / 100) for size in play["sizes_bytes"]]
        for cold in (False, False, True):
            played = ends.play(play | {"cold": cold})
            assert 0.05 <= played.last_byte_s <= played.acked_s
            assert 0 <= played.late_s <= played.last_byte_s
    assert np.isfinite(played.last_byte_s)
