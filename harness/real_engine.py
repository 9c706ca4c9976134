"""What can be judged of a run on real servers: KV by their counters, the budget by what they tell.

The bytes of one request are nobody's to tell, so those of a cell are compared as a whole: what the
prefill servers counted between the first and the last look at them, against the pages that the
prompts of the completed requests hold. A decode server that prefilled a prompt again is missing
there. All servers have the same weights and decode greedily, so every deployment gives the same
tokens for the same prompt. Terms of the TTFT budget that no server of the version tells are named,
and the rest is held against TTFT: it may not exceed it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.core import BUDGET_TERMS
from harness.record.run_directory import Manifest


@dataclass(frozen=True, slots=True)
class Moved:
    """What the prefill servers of one cell counted, wire bytes and requests."""

    kv_bytes: int
    transfers: int


def is_real(manifest: Manifest) -> bool:
    """Whether the run was on servers that are not ours."""
    return bool(manifest.scenario.get("engine", {}).get("kind", "emulated") == "sglang")


def computes(manifest: Manifest) -> bool:
    """Whether its tokens are a model's, so that all deployments have to give the same."""
    return bool(manifest.scenario.get("engine", {}).get("kind", "emulated") != "emulated")


def engine_name(manifest: Manifest) -> str:
    """The engine with its version, as far as it is known."""
    version = manifest.versions.get("sglang")
    return f"SGLang {version}" if version else "SGLang"


def moved(engines: pd.DataFrame, deployment: str, repeat: int) -> Moved | None:
    """The difference of the last and the first sample of each prefill server; None where none of
    them ever counted."""
    rows = engines[
        (engines["deployment"] == deployment)
        & (engines["repeat"] == repeat)
        & (engines["role"] == "prefill")
    ].sort_values("mono_ns")
    if rows["kv_sent_wire_bytes_total"].isna().all():
        return None
    ends = rows.groupby("instance")[["kv_sent_wire_bytes_total", "kv_transfers_total"]]
    # A histogram appears with its first sample: before it there was nothing to count.
    first, last = ends.head(1).fillna(0).sum(), ends.tail(1).fillna(0).sum()
    kv_bytes, transfers = (last - first).astype("int64")
    return Moved(int(kv_bytes), int(transfers))


def figures(frame: pd.DataFrame, engines: pd.DataFrame, name: str) -> dict[str, Any]:
    """What replaces figures that are made of spans on the host's clock, of which there are none."""
    cells = [moved(engines, name, int(repeat)) for repeat in sorted(frame["repeat"].unique())]
    known = [one for one in cells if one is not None]
    whole = len(known) == len(cells) and bool(cells)
    return {
        "prefill_utilisation": None,
        "prefill_utilisation_by_cluster": {},
        "kv_bytes_sent": sum(one.kv_bytes for one in known) if whole else None,
        "kv_bytes_cross": None,
    }


def kv_reasons(
    frame: pd.DataFrame, engines: pd.DataFrame, name: str, manifest: Manifest
) -> Iterator[str]:
    """Where the KV that moved is not the KV of the prompts."""
    engine = engine_name(manifest)
    again = frame[frame["decode_prefilled"].fillna(False).astype(bool)]
    if len(again):
        yield (
            f"{len(again)} requests were prefilled by the decode server itself "
            f"({', '.join(again['rid'].head(3))})"
        )
    for repeat, rows in frame.groupby("repeat"):
        done = rows[rows["outcome"] == "completed"]
        counted = moved(engines, name, int(str(repeat)))
        if counted is None:
            yield (
                f"{engine} counted no KV bytes, so nothing shows that what was decoded had been "
                "sent and not prefilled again"
            )
            return
        expected = int(done["kv_wire_bytes_expected"].sum())
        others = len(done) < len(rows) or bool((rows["retries"].fillna(0) > 0).any())
        if counted.kv_bytes < expected or counted.transfers < len(done):
            yield (
                f"the prefill servers sent {counted.kv_bytes} KV bytes in {counted.transfers} "
                f"transfers, but {len(done)} prompts hold {expected} in pages: the rest was "
                "prefilled again at the decode side, or is of another model"
            )
        elif counted.kv_bytes > expected and not others:
            yield (
                f"the prefill servers sent {counted.kv_bytes} KV bytes in {counted.transfers} "
                f"transfers, and {len(done)} prompts hold only {expected} in pages: others used "
                "the servers, or the KV is of another model, or is sent to several ranks"
            )


def token_reasons(requests: pd.DataFrame, names: tuple[str, ...]) -> Iterator[str]:
    """Deployments that answered a prompt otherwise than the first one; greedy tokens are the same
    whatever way the KV took."""
    done = requests[(requests["outcome"] == "completed") & requests["output_digest"].notna()]
    by_name = {
        name: done[done["deployment"] == name].set_index(["repeat", "rid"])["output_digest"]
        for name in names
    }
    for name in names[1:]:
        pair = pd.concat([by_name[names[0]], by_name[name]], axis=1, join="inner")
        differ = pair[pair.iloc[:, 0] != pair.iloc[:, 1]]
        if len(differ):
            rids = ", ".join(str(rid) for _, rid in differ.index[:3])
            yield (
                f"{name}: {len(differ)} of {len(pair)} prompts were answered with other tokens "
                f"than by {names[0]} ({rids})"
            )


def untold_terms(done: pd.DataFrame) -> tuple[str, ...]:
    """Terms of the budget that no request has."""
    return tuple(term for term in BUDGET_TERMS if len(done) and done[f"{term}_s"].isna().all())


def budget_reasons(
    done: pd.DataFrame, time_scale: float, of_ttft: float, wall_s: float, share: float
) -> Iterator[str]:
    """The terms that are told may not be longer than what they are a part of."""
    told = [f"{term}_s" for term in BUDGET_TERMS if term not in untold_terms(done)]
    rows = done.dropna(subset=[*told, "ttft_s"])
    if len(rows) < len(done):
        yield f"{len(done) - len(rows)} completed requests lack terms that others have"
    if rows.empty:
        return
    ttft_s = rows["ttft_s"].astype("float64")
    beyond_s = rows[told].astype("float64").sum(axis=1) - ttft_s
    bound_s = (of_ttft * ttft_s).clip(lower=wall_s * time_scale)
    over = float((beyond_s > bound_s).mean())
    if over > share:
        yield (
            f"the terms of the TTFT budget that are told exceed TTFT in {100 * over:.1f} % of "
            "requests"
        )


def notes(frame: pd.DataFrame, manifest: Manifest) -> Iterator[str]:
    """What a reader of the figures has to know of the engine."""
    done = frame[frame["outcome"] == "completed"]
    untold = untold_terms(done)
    if untold:
        yield (
            f"not measurable on {engine_name(manifest)}: {', '.join(untold)}; the TTFT budget is "
            "judged by the terms that are told, which may not exceed TTFT, and has no residual"
        )
    retracted = int((frame["retractions"].fillna(0) > 0).sum())
    if retracted:
        yield f"{retracted} requests were retracted by the decode server and resumed"
