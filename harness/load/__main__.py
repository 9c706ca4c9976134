"""``python -m harness.load PLAN.json``: replay a schedule against an OpenAI-compatible server.

Exit status 0 when every planned request has its row, also after a stop; 2 when the plan, the
schedule or a line on stdin is wrong; 3 when the process itself could not do its work.
"""

import locust  # noqa: F401, I001 - first: it patches the standard library for gevent

import gc
import signal
import sys
from pathlib import Path

import gevent

from harness.core import LoadError, PrfaasError, ScenarioError
from harness.load import control
from harness.load.client import Client, allow_open_files
from harness.load.plan import load_plan, read_schedule
from harness.load.prompts import PromptPool
from harness.load.spool import Spool
from harness.load.user import Replay, ReplayEnvironment

STDIN, STDOUT = 0, 1


def main(arguments: list[str]) -> int:
    """The exit status; what is wrong is one paragraph on stderr."""
    try:
        if len(arguments) != 1:
            raise ScenarioError("usage: python -m harness.load PLAN.json")
        if sys.stdin is None or sys.stdout is None:
            raise ScenarioError("stdin and stdout carry the control lines; neither may be closed.")
        replay_plan(Path(arguments[0]))
    except PrfaasError as error:
        print(f"harness.load: {error}", file=sys.stderr)
        return error.exit_status
    return 0


def replay_plan(path: Path) -> None:
    """Run the plan to its end. Raises PrfaasError."""
    plan = load_plan(path)
    schedule = read_schedule(Path(plan.schedule_path))
    allow_open_files()
    pool = PromptPool(plan.salt, max(request.input_tokens for request in schedule))
    client = Client(plan, pool)
    with Spool(Path(plan.spool_path)) as spool:
        replay = Replay(plan, schedule, client, spool)
        environment = ReplayEnvironment(replay)
        signals = [
            gevent.signal_handler(number, replay.stop) for number in (signal.SIGTERM, signal.SIGINT)
        ]
        runner = environment.create_local_runner()
        runner.start(1, spawn_rate=1)
        runner.spawning_greenlet.join()
        # What exists now lives as long as the process. Frozen, it is not scanned again, and a full
        # collection costs only what the requests in flight hold.
        gc.collect()
        gc.freeze()
        control.emit_surely(STDOUT, control.Ready(), replay)
        greenlets = [
            gevent.spawn(control.listen, STDIN, replay),
            gevent.spawn(control.report_progress, STDOUT, replay),
        ]
        for greenlet in greenlets:
            greenlet.link_exception(lambda failed: replay.fail(failed.exception))
        try:
            replay.wait()
        finally:
            gevent.killall(greenlets)
            runner.quit()
            for watcher in signals:
                watcher.cancel()
    _check_statistics(environment, replay)
    control.emit_surely(STDOUT, _finished(replay), replay)
    replay.wait()


def _finished(replay: Replay) -> control.Finished:
    return control.Finished(
        completed=replay.num_completed,
        failed=replay.num_failed,
        unsent=replay.num_unsent,
        send_lag_p99_s=replay.send_lag_p99_s,
    )


def _check_statistics(environment: ReplayEnvironment, replay: Replay) -> None:
    """Locust counted the same requests and failures as the spool."""
    total = environment.stats.total
    seen = (total.num_requests, total.num_failures)
    written = (replay.num_completed + replay.num_failed, replay.num_failed)
    if seen != written:
        raise LoadError(
            f"Locust counted {seen[0]} requests with {seen[1]} failures, the spool has "
            f"{written[0]} with {written[1]}."
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
