"""The load against a server of known truth, on this machine, before a run.

The same process, with as many workers and at the same priority as the run's, over the loopback.
What it is tried with and what it must show: ``harness.load.self_test``. A try that fails is made
once more, since another process may have had the machine for a moment.
"""

import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from harness.core import LoadError, Request
from harness.load import truth
from harness.load.plan import Plan, write_plan, write_schedule
from harness.load.self_test import (
    CHUNK_S,
    MOST_CHUNKS,
    SECONDS,
    TTFT_S,
    Bounds,
    ClientRow,
    fault_of,
    figures,
    hardest_seconds,
    truth_of,
)
from harness.record.spool import read_rows
from harness.scenario import Scenario
from harness.testbed.children import GRACE_S, Children
from harness.testbed.loading import LEAD_S, READY_TIMEOUT_S

TRIES = 2
#: An answer that takes longer is a failure; nothing here lasts two seconds.
_TIMEOUT_S = 10.0


def self_test(
    scenario: Scenario, schedule: Sequence[Request], folder: Path, bounds: Bounds | None = None
) -> dict[str, Any]:
    """Figures of the last try, its bounds, and ``fault``: None, or why not to run.

    Files go to ``folder``, which is made. LoadError when it cannot be tried at all.
    """
    allowed = bounds or Bounds()
    tried = hardest_seconds(
        schedule,
        scenario.scale.time,
        scenario.testbed.stream_interval_tokens,
        scenario.load.concurrency,
    )
    result: dict[str, Any] = {}
    for number in range(TRIES):
        result = _try(scenario, tried, folder / str(number))
        result |= {"tries": number + 1, "bounds": asdict(allowed)}
        result["fault"] = fault_of(result, allowed)
        if result["fault"] is None:
            break
    return result


def refusal(result: dict[str, Any]) -> str:
    """What to tell whose client failed, one paragraph."""
    return (
        f"the load cannot keep this schedule here: against a server of known times, at "
        f"{result['peak_req_per_wall_s']} requests in a wall second and up to "
        f"{result['longest_prompt_tokens']} prompt tokens, {result['fault']}, and no better in "
        f"{result['tries']} tries. Let the machine be quiet, raise load.workers "
        "where it has cores to spare, lower the rate (workload.rate_scale) or scale.time; "
        "`--set testbed.self_test=false` runs without the test, and says so."
    )


def summary(result: dict[str, Any]) -> str:
    """One line for a person."""
    return (
        f"{result['requests']} requests at up to {result['peak_req_per_wall_s']} a wall second, "
        f"{result['longest_prompt_tokens']} prompt tokens: send lag p99 "
        f"{_ms(result['lag_p99_wall_s'])}, TTFT error p50 {_ms(result['ttft_error_p50_wall_s'])}, "
        f"p99 {_ms(result['ttft_error_p99_wall_s'])}"
    )


def _try(scenario: Scenario, tried: tuple[Request, ...], folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    write_schedule(tried, folder / "schedule.jsonl")
    log_path = folder / "truth.jsonl"
    answers = msgspec.structs.replace(
        truth_of(scenario.testbed.stream_interval_tokens), log_path=str(log_path.absolute())
    )
    with truth.TruthServer(answers) as server:
        plan = Plan(
            host="127.0.0.1",
            port=server.port,
            path="/v1/completions",
            api_key=None,
            model=scenario.model.name,
            time_scale=1.0,
            schedule_path="schedule.jsonl",
            spool_path="client.jsonl",
            samples_path="load.jsonl",
            salt="self-test",
            request_timeout_s=_TIMEOUT_S,
            workers=min(scenario.load.workers, len(tried)),
        )
        write_plan(plan, folder / "plan.json")
        _replay(folder, realtime=scenario.testbed.realtime and sys.platform == "linux")
    rows = [
        row
        for path in sorted(folder.glob("client*.jsonl"))
        for row in read_rows(path, ClientRow).rows
    ]
    return figures(tried, rows, truth.read_rows(log_path))


def _replay(folder: Path, *, realtime: bool) -> None:
    with Children() as children:
        load = children.start(
            "load",
            subprocess.Popen,
            ["-m", "harness.load", str(folder / "plan.json")],
            folder / "load.log",
            LoadError,
            1 if realtime else 0,
        )
        children.wait_for(load, "ready", READY_TIMEOUT_S)
        load.tell({"start_mono_ns": time.monotonic_ns() + round(LEAD_S * 1e9)})
        lasts_s = LEAD_S + SECONDS + TTFT_S + CHUNK_S * MOST_CHUNKS
        children.wait_for(load, "finished", lasts_s + _TIMEOUT_S + GRACE_S)
        children.stop(load)


def _ms(value_s: float | None) -> str:
    return "unknown" if value_s is None else f"{1e3 * value_s:.2f} ms"
