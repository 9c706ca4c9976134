"""What SGLang of a version has, lacks, and wants to be told otherwise.

Read in the source of each version and tried with it. Of a version that is not listed nothing is
known: it is launched as the nearest older one that is, and that is said.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.scenario_tables.engines import Requirement

#: Flags that a server without a GPU is given; a version may have none of that name.
CpuFlag = Literal["sleep_on_idle", "mamba_no_buffer", "retraction_backup"]


@dataclass(frozen=True, slots=True)
class Version:
    """``lacks``: by what it is about, what there is not and what that means for a run.
    ``unsupported``: what a scenario may require and this version cannot do, with the reason."""

    number: str
    lacks: dict[str, str]
    unsupported: dict[Requirement, str]
    cpu_flags: dict[CpuFlag, tuple[str, ...]]
    #: Pages of more than one token without a GPU.
    cpu_pages: bool


VERSIONS: dict[str, Version] = {
    "0.5.9": Version(
        number="0.5.9",
        lacks={
            "kv_metrics": "its kv_transfer gauges are never set, so the bytes that it moved are "
            "not known and not compared with S_kv",
            "sleep_on_idle": "its idle sleep holds up PD requests, so it is not asked for, and an "
            "idle server keeps a core busy",
            "cpu_pages": "without a GPU its pages have one token",
        },
        unsupported={
            "kv_metrics": "SGLang 0.5.9 has no counter of the KV bytes that it sends",
        },
        cpu_flags={"mamba_no_buffer": ("--mamba-scheduler-strategy", "no_buffer")},
        cpu_pages=False,
    ),
    "0.5.23": Version(
        number="0.5.23",
        lacks={
            "layerwise": "KV is sent after each prefill chunk, not after each layer",
        },
        unsupported={},
        cpu_flags={
            "sleep_on_idle": ("--sleep-on-idle",),
            "mamba_no_buffer": ("--mamba-radix-cache-strategy", "no_buffer"),
            "retraction_backup": ("--disaggregation-decode-retraction-backup", "cpu_tensor"),
        },
        cpu_pages=True,
    ),
}


def known_version(number: str) -> tuple[Version, str | None]:
    """The version to go by, and a sentence where ``number`` itself is not one that is known."""
    if number in VERSIONS:
        return VERSIONS[number], None
    ordered = sorted(VERSIONS, key=_order)
    older = [one for one in ordered if _order(one) <= _order(number)]
    nearest = older[-1] if older else ordered[0]
    return VERSIONS[nearest], (
        f"SGLang {number} is not tested here ({', '.join(ordered)} are): it is launched like "
        f"{nearest}, and what it lacks is not known"
    )


def unsupported(number: str, requires: Sequence[Requirement]) -> str | None:
    """Why a known version cannot do what is required; None where it can, or is not known."""
    version = VERSIONS.get(number)
    if version is None:
        return None
    reasons = [version.unsupported[need] for need in requires if need in version.unsupported]
    return "; ".join(reasons) or None


def _order(number: str) -> tuple[int, ...]:
    """``0.5.10.post1`` after ``0.5.9``; what follows the digits of a part does not count."""
    parts = [re.match(r"\d+", part) for part in number.split(".")]
    return tuple(int(part.group()) for part in parts if part)
