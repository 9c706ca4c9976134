"""Markers name what a test needs; a test whose need this machine cannot meet is deselected.

Deselected and not skipped: pytest prints their number and names, and CI treats any skip as a
failure of the machine that should have met the need.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from netem.link import LinkError, symmetric
from netem.routed import open_netem


def _has_cuda() -> bool:
    return shutil.which("nvidia-smi") is not None and (
        subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode == 0
    )


def _has_netadmin() -> bool:
    return os.geteuid() == 0 and Path("/dev/net/tun").exists()


@cache
def _has_netem() -> bool:
    """Whether this kernel has tc-netem; true where it has to, so that a lack fails."""
    if "PRFAAS_REQUIRE_NETEM" in os.environ:
        return True
    try:
        with open_netem(symmetric("probe", 1e6, 0.0)):
            return True
    except (LinkError, OSError):
        return False


# Other work on the machine must not fail a test: no limit on the time of an example.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

NEEDS: dict[str, Callable[[], bool]] = {
    "gpu": _has_cuda,
    "netadmin": _has_netadmin,
    "netem": _has_netem,
    "sglang": lambda: find_spec("sglang") is not None,
    "aiconfigurator": lambda: find_spec("aiconfigurator") is not None,
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {need for need, is_met in NEEDS.items() if not is_met()}
    unmet = [item for item in items if any(item.get_closest_marker(need) for need in missing)]
    if unmet:
        config.hook.pytest_deselected(items=unmet)
        items[:] = [item for item in items if item not in unmet]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.stats.get("deselected") and not _has_netem():
        terminalreporter.write_line(
            "This kernel has no tc-netem: `nox -s netem` tests with one that has, in User-Mode "
            "Linux (apt-get install user-mode-linux)."
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skip means that the machine was not prepared: a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
