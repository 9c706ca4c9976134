"""Imports point down only, decisions hold no clock, and locust stays in one package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

#: The rooms of ``harness`` from the ground up: one imports its own floor's modules never, those
#: below it freely. A module that is not listed fails the test: give it a floor.
FLOORS: tuple[tuple[str, ...], ...] = (
    (
        "attention",
        "block_keys",
        "core",
        "key_runs",
        "lognormal",
        "machine",
        "phrases",
        "plain",
        "queueing",
        "scenario_values",
        "statistics",
        "timerfd",
    ),
    ("schedule",),
    (
        "child",
        "console",
        "cores",
        "datafile",
        "deployment",
        "map_queue",
        "prefix_holders",
        "profile",
        "profile_measurement",
        "record",
        "server",
        "surface",
        "transfer_rate",
        "transport",
    ),
    (
        "architecture",
        "load",
        "perfetto",
        "prefix_store",
        "profile_file",
        "real_engine",
        "scenario_tables",
        "summary",
        "trace",
    ),
    (
        "burstiness",
        "engine_settings",
        "kv_layers",
        "model_families",
        "prefix_pool",
        "published",
        "replication",
        "scenario_file",
        "settings",
        "verdict",
    ),
    ("kv_blocks",),
    (
        "engine",
        "figures",
        "kv_path",
        "model_config",
        "profile_import",
        "profile_summary",
        "resolution",
        "scenario_schema",
    ),
    (
        "arrival_resolution",
        "engine_resolution",
        "faults",
        "gateway_settings",
        "mechanisms",
        "nodes",
        "report",
    ),
    ("workload_resolution",),
    ("scenario",),
    ("transfer_model",),
    ("scenario_change", "scheduling", "workload"),
    ("gateway", "utilisation"),
    ("simulator", "testbed", "throughput"),
    ("engine_traffic", "link_fidelity", "preparation", "ttft"),
    (
        "bench",
        "launch_plan",
        "planning",
        "profile_matrix",
        "profiler",
        "saturation",
        "simulation_summary",
    ),
    ("simulation_run", "sweep"),
    ("scenario_text", "scenario_doctor"),
    ("verbs",),
    ("cli",),
    ("__main__",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
PACKAGES = ("harness", "netem", "reports")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
#: Nothing that reads a clock, draws from a global generator or does I/O.
IMPURE = {"time", "datetime", "random", "secrets", "socket", "asyncio", "threading", "subprocess"}
PURE = (
    "harness/scheduling",
    "harness/key_runs.py",
    "harness/prefix_holders.py",
    "harness/prefix_pool.py",
    "harness/prefix_store.py",
    "harness/block_keys.py",
    "harness/schedule.py",
    "harness/workload",
    "harness/surface/framing.py",
    "harness/surface/sse.py",
    "harness/transport/wire.py",
    "harness/transport/frames.py",
    "harness/saturation",
    "harness/simulator",
    "harness/throughput",
    "harness/kv_blocks.py",
    "harness/kv_layers.py",
    "harness/kv_path.py",
    "harness/transfer_model.py",
    "harness/transfer_rate.py",
    "harness/queueing.py",
    "harness/replication.py",
    "harness/map_queue.py",
    "harness/burstiness.py",
    "harness/statistics",
    "harness/ttft",
    "harness/profiler/estimate.py",
    "harness/profiler/plan.py",
    "harness/sweep/pareto.py",
    "harness/sweep/summary.py",
    "harness/engine/noise.py",
    "netem/chance.py",
    "netem/delay_tables.py",
    "netem/delayline.py",
    "netem/flowcap.py",
    "netem/hops.py",
    "netem/impairments.py",
    "netem/jitter.py",
    "netem/link.py",
    "netem/loss.py",
    "netem/segments.py",
    "netem/variation.py",
    "netem/way.py",
)


def imports_of(path: Path) -> set[str]:
    """Dotted names that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found.update({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)})
    return found


def room_of(path: Path) -> str:
    return path.relative_to(ROOT / "harness").with_suffix("").parts[0]


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_imports_point_down(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    ours = {
        name for name in imports_of(path) if name.split(".")[0] in {"harness", "netem", "reports"}
    }
    if package != "harness":
        assert {name.split(".")[0] for name in ours} <= {package}
        return
    if room_of(path) == "__init__":
        assert not ours
        return
    floor = FLOOR_OF[room_of(path)]
    for name in ours:
        parts = name.split(".")
        if parts[0] != "harness" or len(parts) == 1 or parts[1] in {room_of(path), "__version__"}:
            continue
        assert FLOOR_OF[parts[1]] < floor, f"{label(path)} on floor {floor} imports {name}"


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_locust_and_gevent_stay_in_the_load_package(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports_of(path)}
    if not label(path).startswith("harness/load/"):
        assert not roots & {"locust", "gevent"}


@pytest.mark.parametrize("place", PURE)
def test_decisions_and_formats_hold_no_clock_socket_or_generator(place: str) -> None:
    base = ROOT / place
    for path in [base] if base.is_file() else sorted(base.rglob("*.py")):
        roots = {name.split(".")[0] for name in imports_of(path)}
        allowed = {"random"} if place.startswith("netem/") else set()  # generators given a seed
        assert not (roots & IMPURE) - allowed, label(path)


def test_the_model_and_the_plan_pull_in_nothing_heavy() -> None:
    code = (
        "import sys, harness.throughput, harness.load.plan, harness.load.prompts\n"
        "print([m for m in ('torch', 'locust', 'gevent', 'pandas') if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert result.stdout.strip() == "[]"
