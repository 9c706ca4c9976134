"""What is judged of a run on real servers, by tables in which something is wrong."""

from typing import Any

import pandas as pd
import pytest

from harness import real_engine
from harness.core import BUDGET_TERMS
from harness.record.run_directory import Cell, Manifest

PAGES = 32_768


def manifest(kind: str = "sglang") -> Manifest:
    return Manifest(
        run_id="r",
        started_utc="",
        started_mono_ns=0,
        scenario={"engine": {"kind": kind}},
        scenario_hash="",
        time_scale=1.0,
        byte_scale=1.0,
        deployments=(Cell("prfaas_pd", 0),),
        instances={"prfaas_pd": ()},
        versions={"sglang": "0.5.23"},
    )


def requests(deployment: str = "prfaas_pd", **changes: Any) -> pd.DataFrame:
    """Four requests of one cell, of 1 to 4 pages."""
    rows = [
        {
            "deployment": deployment,
            "repeat": 0,
            "rid": f"r{one}",
            "outcome": "completed",
            "retries": 0,
            "retractions": 0,
            "decode_prefilled": False,
            "kv_wire_bytes_expected": one * PAGES,
            "output_digest": f"digest-{one}",
            "ttft_s": 0.5,
            **{f"{term}_s": 0.05 for term in BUDGET_TERMS},
        }
        | changes
        for one in (1, 2, 3, 4)
    ]
    return pd.DataFrame(rows)


def engines(*totals: tuple[str, int | None, int | None]) -> pd.DataFrame:
    """Samples in order: instance, bytes and transfers so far."""
    rows = [
        {
            "deployment": "prfaas_pd",
            "repeat": 0,
            "mono_ns": at,
            "instance": instance,
            "role": "prefill",
            "kv_sent_wire_bytes_total": kv_bytes,
            "kv_transfers_total": transfers,
        }
        for at, (instance, kv_bytes, transfers) in enumerate(totals)
    ]
    whole = {"kv_sent_wire_bytes_total": "Int64", "kv_transfers_total": "Int64"}
    return pd.DataFrame(rows).astype(whole)


#: Both servers had a canary of a page before; one of them had not counted anything yet.
EXACT = (
    ("far", PAGES, 1),
    ("near", None, None),
    ("far", 8 * PAGES, 3),
    ("near", 3 * PAGES, 2),
)


def kv_reasons(frame: pd.DataFrame, *totals: tuple[str, int | None, int | None]) -> list[str]:
    return list(real_engine.kv_reasons(frame, engines(*totals), "prfaas_pd", manifest()))


def test_bytes_that_agree_give_no_reason_and_are_the_figure() -> None:
    assert kv_reasons(requests(), *EXACT) == []
    found = real_engine.figures(requests(), engines(*EXACT), "prfaas_pd")
    assert found["kv_bytes_sent"] == 10 * PAGES
    assert found["prefill_utilisation"] is None
    assert found["kv_bytes_cross"] is None


def test_a_prompt_that_was_prefilled_again_is_missing_in_the_bytes() -> None:
    short = (*EXACT[:2], ("far", 6 * PAGES, 2), EXACT[3])
    (reason,) = kv_reasons(requests(), *short)
    assert f"{8 * PAGES} KV bytes in 3 transfers, but 4 prompts hold {10 * PAGES}" in reason
    assert "prefilled again at the decode side" in reason


def test_a_decode_server_that_says_that_it_prefilled_is_believed() -> None:
    (reason,) = kv_reasons(requests(decode_prefilled=True), *EXACT)
    assert reason.startswith("4 requests were prefilled by the decode server itself (r1, r2, r3")


def test_more_bytes_than_prompts_are_others_unless_a_request_failed_or_was_retried() -> None:
    more = (*EXACT[:2], ("far", 9 * PAGES, 4), EXACT[3])
    (reason,) = kv_reasons(requests(), *more)
    assert "others used the servers" in reason
    assert kv_reasons(requests(retries=1), *more) == []


def test_a_version_that_counts_nothing_shows_nothing() -> None:
    (reason,) = kv_reasons(requests(), ("far", None, None), ("far", None, None))
    assert "SGLang 0.5.23 counted no KV bytes" in reason
    nothing = engines(("far", None, None), ("far", None, None))
    assert real_engine.figures(requests(), nothing, "prfaas_pd")["kv_bytes_sent"] is None


def test_other_tokens_than_the_first_deployments_are_named() -> None:
    other = requests("homogeneous_pd")
    other.loc[2, "output_digest"] = "another"
    both = pd.concat([requests(), other])
    (reason,) = real_engine.token_reasons(both, ("prfaas_pd", "homogeneous_pd"))
    assert reason == (
        "homogeneous_pd: 1 of 4 prompts were answered with other tokens than by prfaas_pd (r3)"
    )
    same = pd.concat([requests(), requests("homogeneous_pd")])
    assert list(real_engine.token_reasons(same, ("prfaas_pd", "homogeneous_pd"))) == []


def test_terms_that_no_server_tells_are_named_and_the_rest_is_judged() -> None:
    untold = requests(transfer_s=None, decode_admission_s=None)
    (note,) = real_engine.notes(untold, manifest())
    assert note.startswith("not measurable on SGLang 0.5.23: transfer, decode_admission")
    bounds = {"time_scale": 1.0, "of_ttft": 0.02, "wall_s": 0.002, "share": 0.05}
    assert list(real_engine.budget_reasons(untold, **bounds)) == []
    longer = requests(transfer_s=None, prefill_s=0.4)
    (reason,) = real_engine.budget_reasons(longer, **bounds)
    assert "exceed TTFT in 100.0 % of requests" in reason
    assert list(real_engine.notes(requests(), manifest())) == []


@pytest.mark.parametrize(
    ("kind", "real", "computes"),
    [("sglang", True, True), ("reference", False, True), ("emulated", False, False)],
)
def test_only_servers_that_are_not_ours_are_real(kind: str, real: bool, computes: bool) -> None:
    """Tokens are compared of all that compute."""
    assert real_engine.is_real(manifest(kind)) is real
    assert real_engine.computes(manifest(kind)) is computes
