"""What benchmarks/gateway.py measures: a pair of workers, our gateway, and SGLang's router.

Every process runs at the same priority. The workers are emulated engines that compute for no time
and whose KV weighs next to nothing, so that what is left is HTTP, parsing and the handoff itself.
"""

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.gateway_client import Address
from harness.core import EngineError
from harness.record.run_directory import Cell, RunDirectory
from harness.scenario import load_scenario
from harness.testbed.local import LocalTestbed
from netem.testlink import open_link

ROOT = Path(__file__).parent.parent
ROUTER = "sglang-router"
READY_S = 30.0
#: Shortest times a profile can hold; a step that streams 16 tokens over 75 ms.
PREFILL_S, STEP_S = 1e-6, 5e-3


@dataclass(frozen=True, slots=True)
class Served:
    """One pair, and the gateway before it."""

    gateway: Address
    prefill: Address
    decode: Address
    spool: Path

    def own_s(self, start_ns: int, end_ns: int) -> list[float]:
        """What the gateway itself timed of each request that came between two instants: from its
        head seen to its prefill half handed over, and from its first token seen to that written."""
        rows = [json.loads(line) for line in self.spool.read_text().splitlines()]
        return [
            (
                row["dispatched_mono_ns"]
                - row["received_mono_ns"]
                + row["first_written_mono_ns"]
                - row["first_chunk_mono_ns"]
            )
            / 1e9
            for row in rows
            if start_ns <= row["received_mono_ns"] <= end_ns
        ]


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """The homogeneous deployment with one instance of each role."""
    profile = _free_profile(folder / "free.json")
    scenario = load_scenario(
        ROOT / "scenarios/paper-case-study.toml",
        (
            f'hardware.h20.profile="{profile}"',
            f'hardware.h200.profile="{profile}"',
            "scale.time=1",
            "scale.bytes=1000000",
            'fabric.rate="40000000gbit"',
            "testbed.stream_interval_tokens=1",
            "testbed.realtime=false",
            "deployments.homogeneous_pd.num_prefill=1",
            "deployments.homogeneous_pd.num_decode=1",
        ),
    )
    run = RunDirectory.create(folder, "gateway", datetime.now(UTC))
    deployment, cell = scenario.deployments["homogeneous_pd"], Cell("homogeneous_pd", 0)
    spec = scenario.link.scaled(scenario.scale.time, scenario.scale.bytes)
    with (
        open_link(spec, "relay") as link,
        LocalTestbed(scenario, deployment, run, cell, link) as testbed,
    ):
        host = link.near.address
        at = {
            name: Address(*where, testbed.worker_key) for name, where in testbed.addresses.items()
        }
        gateway = Address(host, testbed.gateway_port, testbed.gateway_key)
        yield Served(gateway, at["pd-p0"], at["pd-d0"], run.spool_path(cell, "gateway"))


def _free_profile(path: Path) -> Path:
    """A profile by which nothing takes time."""
    profile = json.loads((ROOT / "profiles/prfaas-1t-8xh20.json").read_text())
    origin = {"provenance": "measured", "source": "set"}
    profile["prefill"]["points"] = [
        {"new_tokens": tokens, "cached_tokens": 0, "prefill_s": PREFILL_S} | origin
        for tokens in (1, 200_000)
    ]
    profile["decode"]["max_batch"] = 256
    profile["decode"]["points"] = [
        {"batch": batch, "context_tokens": context, "step_s": STEP_S} | origin
        for batch in (1, 256)
        for context in (1, 300_000)
    ]
    path.write_text(json.dumps(profile))
    return path


def router_lack() -> str | None:
    """Why the router cannot be measured here, or None; with its version where it can."""
    try:
        version(ROUTER)
    except PackageNotFoundError:
        needs = "setproctitle orjson fastapi uvicorn requests"
        return (
            f"{ROUTER} is not installed; pip install {needs}, pip install --no-deps {ROUTER}==0.3.2"
        )
    asked = [sys.executable, "-m", "sglang_router.launch_router", "--help"]
    ran = subprocess.run(asked, capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        return f"{ROUTER} does not start: {ran.stderr.strip().splitlines()[-1]}"
    return None


@contextmanager
def router(served: Served) -> Iterator[Address]:
    """SGLang's router in PD mode before the same pair; it hands the client's key on."""
    port = _free_port()
    prefill, decode = served.prefill, served.decode
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"),
        *("--prefill", f"http://{prefill.host}:{prefill.port}", str(prefill.port)),
        *("--decode", f"http://{decode.host}:{decode.port}", "--policy", "round_robin"),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(_free_port())),
        *(f"--api-key={prefill.key}", "--log-level", "error"),  # a key may begin with a dash
    ]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            if not _is_ready(process, f"http://127.0.0.1:{port}/readiness", prefill.key):
                log.seek(0)
                said = log.read()[-500:].decode(errors="replace")
                raise EngineError(f"{ROUTER} was not ready within {READY_S:g} s: {said}")
            yield Address("127.0.0.1", port, prefill.key)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_ready(process: "subprocess.Popen[bytes]", url: str, key: str) -> bool:
    deadline_s = time.monotonic() + READY_S
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            with urllib.request.urlopen(asked, timeout=2):
                return True
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
