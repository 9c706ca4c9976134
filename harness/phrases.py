"""A summary's figures as the report words them."""

from collections.abc import Iterator
from typing import Any

_MAX_TEXT = 400
#: The stages as short as a column of a terminal takes them.
SHORT_STAGES = {
    "prfaas_prefill": "PrfaaS",
    "pd_prefill": "prefill",
    "pd_decode": "decode",
    "link": "link",
    "fabric": "fabric",
}


def flat(values: dict[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    """Nested values as dotted names and short texts, what is missing left out."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat(value, f"{before}{key}.")
        elif value is not None and value not in ([], ""):
            text = f"{value:g}" if isinstance(value, float) else str(value)
            yield f"{before}{key}", text[:_MAX_TEXT]


def interval_text(interval: dict[str, Any], factor: float = 1.0) -> str | None:
    """An interval times ``factor``; None where there is none."""
    low, high = interval["low"], interval["high"]
    if low is None:
        return None
    return f"{low * factor:.2f} to {'infinite' if high is None else f'{high * factor:.2f}'}"


def length_text(over_tokens: int, high_tokens: int | None) -> str:
    """A bin (over, high] of input lengths; the last one is open."""
    if high_tokens is None:
        return f"over {over_tokens:,}"
    return f"{over_tokens + 1:,} to {high_tokens:,}"


def rate_text(rate_req_per_s: float | None, part: float | None) -> str | None:
    """Requests a second with the share that they are."""
    if rate_req_per_s is None or part is None:
        return None
    return f"{rate_req_per_s:.3f} ({100 * part:.1f} %)"


def listed_text(values: list[float | None]) -> str:
    """Values side by side, a dash for a missing one."""
    return ", ".join("-" if value is None else f"{value:.3f}" for value in values)


def yes_text(value: bool | None) -> str | None:
    """A flag as a word."""
    return None if value is None else ("yes" if value else "no")


def quantile_text(summary: dict[str, Any], key: str) -> str | float | None:
    """A quantile, or what stands in its place and why."""
    value: float | None = summary[f"{key}_s"]
    if value is not None or f"{key}_reason" not in summary:
        return value
    success = summary[f"{key}_success_s"]
    if success is None:
        return "too few samples" if key == "ttft_p99" else "infinite"
    return f"infinite ({success:.2f} of those completed)"


def percent(value: float | None, *, sign: bool = True) -> str | None:
    """A share in percent."""
    if value is None:
        return None
    shown = f"{100 * value:+.1f}" if sign else f"{100 * value:.1f}"
    return f"{'0.0' if shown in ('+0.0', '-0.0') else shown} %"


def milliseconds(value_s: float | None) -> str | None:
    """Seconds as milliseconds to one decimal, so that the rows of a table line up."""
    return None if value_s is None else f"{1e3 * value_s:,.1f}"


def tolerances(check: dict[str, Any]) -> str:
    """The tolerances that a link check brings, as a sentence; empty where it brings none."""
    parts = [f"{key.replace('_', ' ')} {text}" for key, text in flat(check) if "tolerance" in key]
    return f" Allowed: {', '.join(parts)}." if parts else ""


def scaled(value: float | None, factor: float) -> float | None:
    """The value in another unit."""
    return None if value is None else value * factor


def rounded(value: float | None) -> int | None:
    """To the nearest whole number."""
    return None if value is None else round(value)
