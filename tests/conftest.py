"""Markers name what a test needs; a test whose need this machine cannot meet is deselected.

Deselected and not skipped: pytest prints their number and names, and CI treats any skip as a
failure of the machine that should have met the need.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest


def _has_cuda() -> bool:
    return shutil.which("nvidia-smi") is not None and (
        subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0
    )


def _has_netadmin() -> bool:
    return os.geteuid() == 0 and Path("/dev/net/tun").exists()


NEEDS: dict[str, Callable[[], bool]] = {
    "gpu": _has_cuda,
    "netadmin": _has_netadmin,
    "sglang": lambda: find_spec("sglang") is not None,
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {need for need, is_met in NEEDS.items() if not is_met()}
    unmet = [item for item in items if any(item.get_closest_marker(need) for need in missing)]
    if unmet:
        config.hook.pytest_deselected(items=unmet)
        items[:] = [item for item in items if item not in unmet]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skip means that the machine was not prepared: a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
