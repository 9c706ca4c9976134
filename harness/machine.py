"""What a run ran on: machine, kernel, clocks and package versions, for its manifest."""

import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from harness import __version__

PACKAGES = (
    "aiohttp",
    "gevent",
    "locust",
    "msgspec",
    "numpy",
    "pandas",
    "pyarrow",
    "pyroute2",
    "scipy",
    "uvloop",
    "xxhash",
)


def describe_machine() -> dict[str, Any]:
    """CPU, memory, kernel; null where this system does not say."""
    return {
        "cpu_count": os.cpu_count(),
        "cpus_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "cpu_model": _proc_value("/proc/cpuinfo", "model name"),
        "memory_bytes": _memory_bytes(),
        "kernel": platform.release(),
        "system": platform.system(),
        "load_average_before": list(os.getloadavg()),
    }


def describe_versions() -> dict[str, Any]:
    """Versions of Python, this package and the packages whose behaviour a figure depends on."""
    return {
        "python": sys.version.split()[0],
        "prfaas-bench": __version__,
        **{name: metadata.version(name) for name in PACKAGES},
    }


def describe_clocks() -> dict[str, Any]:
    """The one clock of a local run: every process of the host reads CLOCK_MONOTONIC."""
    info = time.get_clock_info("monotonic")
    return {
        "kind": "CLOCK_MONOTONIC, one host",
        "implementation": info.implementation,
        "resolution_s": info.resolution,
        "offset_bound_s": 0.0,
    }


def _memory_bytes() -> int | None:
    text = _proc_value("/proc/meminfo", "MemTotal")
    return None if text is None else int(text.split()[0]) * 1024


def _proc_value(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None
