"""What ``prfaas profile show`` tells of a profile file: ranges, provenance, decode."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.profile_file import ProfileFile, profile_of, read_profile_file


def profile_summary(path: Path) -> dict[str, Any]:
    """One JSON document; ``decode`` is null for a profile of prefill only."""
    file = read_profile_file(path)
    return {
        "file": str(path),
        "name": file.name,
        "model": file.model,
        "hardware": file.hardware,
        "gpus_per_instance": file.gpus_per_instance,
        "engine": file.engine.model_dump(),
        "notes": file.notes,
        "prefill": _prefill(file, path),
        "decode": _decode(file),
    }


def _prefill(file: ProfileFile, path: Path) -> dict[str, Any]:
    profile = profile_of(file, path)
    low, high = profile.covered_tokens
    uncached_s = [point.prefill_s for point in profile.prefill_points if not point.cached_tokens]
    return {
        "interpolation": file.prefill.interpolation,
        "min_new_tokens": low,
        "max_new_tokens": high,
        "cached_tokens": sorted({point.cached_tokens for point in profile.prefill_points}),
        "min_prefill_s": min(uncached_s),
        "max_prefill_s": max(uncached_s),
        "points_by_provenance": dict(Counter(p.provenance for p in profile.prefill_points)),
    }


def _decode(file: ProfileFile) -> dict[str, Any] | None:
    decode = file.decode
    if decode is None:
        return None
    times_s = [point.step_s for point in decode.points]
    return {
        "max_batch": decode.max_batch,
        "max_batch_provenance": decode.provenance,
        "batches": sorted({point.batch for point in decode.points}),
        "context_tokens": sorted({point.context_tokens for point in decode.points}),
        "min_step_s": min(times_s),
        "max_step_s": max(times_s),
        "points_by_provenance": dict(Counter(point.provenance for point in decode.points)),
    }


def summary_lines(summary: dict[str, Any]) -> Iterator[str]:
    """The same for people."""
    engine, prefill, decode = summary["engine"], summary["prefill"], summary["decode"]
    yield (
        f"{_plain(summary['name'])}: {_plain(summary['model'])} on {_plain(summary['hardware'])} "
        f"({summary['gpus_per_instance']} GPUs), {_plain(engine['name'])} "
        f"{_plain(engine['version'])}"
    )
    cached = ", ".join(map(str, prefill["cached_tokens"]))
    axis = f"cached {cached}" if len(prefill["cached_tokens"]) > 1 else "no cached axis"
    yield (
        f"prefill: {prefill['min_new_tokens']} to {prefill['max_new_tokens']} new tokens, {axis}; "
        f"{prefill['min_prefill_s']:.4g} to {prefill['max_prefill_s']:.4g} s without a prefix; "
        f"{prefill['interpolation']}; {_points(prefill)}"
    )
    if decode is None:
        yield "decode: none, this hardware only prefills"
    else:
        contexts = decode["context_tokens"]
        yield (
            f"decode: batches of {decode['batches'][0]} to {decode['batches'][-1]}, at most "
            f"{decode['max_batch']} ({decode['max_batch_provenance']}), {contexts[0]} to "
            f"{contexts[-1]} tokens of context; {1e3 * decode['min_step_s']:.4g} to "
            f"{1e3 * decode['max_step_s']:.4g} ms a step; {_points(decode)}"
        )
    if summary["notes"]:
        yield f"notes: {_plain(summary['notes'])}"


def _plain(text: str) -> str:
    """A file's text on one line, without what would steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def _points(part: dict[str, Any]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in part["points_by_provenance"].items())
