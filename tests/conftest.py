"""Markers name what a test needs; a test whose need this machine cannot meet is deselected.

Deselected and not skipped: how many is said at the end, and CI treats any skip as a failure of the
machine that should have met the need. ``nox`` runs what is marked ``quiet`` by itself and the rest
in several processes, each file in one: tests of one file may share what they start.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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


def _has_sglang() -> bool:
    """Whether SGLang serves here without a GPU; true where it has to, so that a lack fails."""
    if "PRFAAS_REQUIRE_SGLANG" in os.environ:
        return True
    return all(find_spec(name) is not None for name in ("sglang", "prfaas_sglang_cpu"))


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
    "sglang": _has_sglang,
    "aiconfigurator": lambda: find_spec("aiconfigurator") is not None,
    "ray": lambda: find_spec("ray") is not None,
    "torch": lambda: find_spec("torch") is not None,
    "transformers": lambda: find_spec("transformers") is not None,
}


#: How many tests each unmet need leaves out.
UNMET = pytest.StashKey[dict[str, int]]()


@pytest.hookimpl(trylast=True)  # Of what the options ask for.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = [need for need, is_met in NEEDS.items() if not is_met()]
    needing = {need: [i for i in items if i.get_closest_marker(need)] for need in missing}
    unmet = {item for those in needing.values() for item in those}
    if unmet:
        config.hook.pytest_deselected(items=[item for item in items if item in unmet])
        items[:] = [item for item in items if item not in unmet]
    config.stash[UNMET] = {need: len(those) for need, those in needing.items() if those}
    if hasattr(config, "workeroutput"):  # One of several processes: the first one says it.
        config.workeroutput["unmet"] = config.stash[UNMET]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """All processes found the same, unless one died."""
    node.config.stash[UNMET] = getattr(node, "workeroutput", {}).get("unmet", {})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    unmet = config.stash.get(UNMET, {})
    for need, count in unmet.items():
        terminalreporter.write_line(f"Not run, since this machine has no {need}: {count} tests.")
    if "netem" in unmet:
        terminalreporter.write_line(
            "`nox -s netem` tests with a kernel that has tc-netem, in User-Mode Linux (apt-get "
            "install user-mode-linux)."
        )
    if "sglang" in unmet:
        terminalreporter.write_line(
            "`nox -s sglang-cpu` tests with real SGLang servers, which need no GPU (2.4 GB)."
        )


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skip means that the machine was not prepared: a failure."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if os.environ.get("CI") and reporter is not None and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
