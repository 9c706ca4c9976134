"""``python -m harness.load PLAN.json``: replay a schedule against an OpenAI-compatible server.

``python -m harness.load worker`` is one of several workers of such a run: with ``--master`` on any
host, else as its master starts it, told all on stdin.

Exit status 0 when every planned request has its row, also after a stop; 2 when the plan, the
schedule or a line on stdin is wrong; 3 when the process itself could not do its work.
"""

import locust  # noqa: F401, I001 - first: it patches the standard library for gevent

import argparse
import gc
import os
import sys
from contextlib import ExitStack
from pathlib import Path

import gevent
import msgspec
from gevent import socket

from harness import child
from harness.core import LoadError, PrfaasError, ScenarioError
from harness.load import control
from harness.load.client import Client, allow_open_files
from harness.load.crew import Crew
from harness.load.distributed import crew_of, finish
from harness.load.plan import Plan, load_plan, read_schedule
from harness.load.prompts import PromptPool
from harness.load.replay import Replay
from harness.load.samples import sample
from harness.load.schedule import Shard
from harness.load.spool import Spool
from harness.load.statistics import check_statistics
from harness.load.user import ReplayEnvironment
from harness.load.worker import LoadWorker, WorkerConfig, run_worker

STDIN, STDOUT = 0, 1
USAGE = "usage: python -m harness.load PLAN.json, or python -m harness.load worker --help"


def main(arguments: list[str]) -> int:
    """The exit status; what is wrong is one paragraph on stderr."""
    try:
        if arguments[:1] == ["worker"]:
            be_worker(arguments[1:])
            return 0
        if len(arguments) != 1:
            raise ScenarioError(USAGE)
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
    if plan.distributed:
        _replay_in_crew(plan, schedule)
    else:
        _replay_alone(plan, schedule)


def _replay_alone(plan: Plan, schedule: Shard) -> None:
    allow_open_files()
    pool = PromptPool(plan.salt, int(schedule.input_tokens.max()))
    client = Client(plan, pool)
    with ExitStack() as stack:
        stack.callback(client.close)
        spool = stack.enter_context(Spool(Path(plan.spool_path)))
        replay = Replay(plan, schedule, client, spool, plan.concurrency)
        environment = ReplayEnvironment(replay)
        stack.enter_context(control.stopped_by_signals(replay))
        runner = environment.create_local_runner()
        stack.callback(runner.quit)
        runner.start(1, spawn_rate=1)
        runner.spawning_greenlet.join()
        if plan.samples_path is not None:
            samples = stack.enter_context(child.Spool(plan.samples_path))
            sampler = gevent.spawn(sample, replay, 0, samples.write)
            sampler.link_exception(lambda failed: replay.fail(failed.exception))
            stack.callback(sampler.kill)
        # What exists now lives as long as the process. Frozen, it is not scanned again, and a full
        # collection costs only what the requests in flight hold.
        gc.collect()
        gc.freeze()
        control.drive(replay, STDIN, STDOUT, replay.wait)
    check_statistics(environment.stats, plan.path, replay.num_completed, replay.num_failed)
    control.emit_surely(STDOUT, _finished(replay), replay)
    replay.wait()


def _replay_in_crew(plan: Plan, schedule: Shard) -> None:
    with crew_of(plan, schedule, STDOUT) as (crew, environment):
        control.drive(crew, STDIN, STDOUT, crew.wait)
        finish(crew, environment, plan, STDOUT)
    control.emit_surely(STDOUT, _finished(crew), crew)
    if crew.error is not None:
        raise crew.error


def _finished(run: Replay | Crew) -> control.Finished:
    return control.Finished(
        completed=run.num_completed,
        failed=run.num_failed,
        unsent=run.num_unsent,
        send_lag_p99_s=run.send_lag_p99_s,
        lost=run.num_lost,
    )


def be_worker(arguments: list[str]) -> None:
    """Be one worker of a run. Raises PrfaasError."""
    if arguments:
        run_worker(_remote_config(arguments), _alone)
        return
    try:
        config = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerConfig)
    except msgspec.DecodeError as error:
        raise ScenarioError(f"{USAGE}; stdin has no configuration: {error}.") from error
    joined: list[LoadWorker] = []
    gevent.spawn(_leave_with_master, joined)
    run_worker(config, joined.append)


def _alone(_: LoadWorker) -> None:
    """A worker that was started by hand has no parent to end with."""


def _leave_with_master(joined: list[LoadWorker]) -> None:
    """The end of stdin means that the master is gone. A greenlet of its own."""
    while True:
        socket.wait_read(STDIN)
        if not os.read(STDIN, 4096):
            break
    if not joined:
        os._exit(LoadError.exit_status)
    joined[0].released.set()
    if not joined[0].halted.ready():
        joined[0].halted.set(LoadError("the master is gone; the worker stops."))


def _remote_config(arguments: list[str]) -> WorkerConfig:
    parser = argparse.ArgumentParser(
        prog="python -m harness.load worker",
        description="Join the load of a run whose plan has remote_workers.",
    )
    parser.add_argument("--master", required=True, metavar="HOST:PORT", help="where it listens")
    parser.add_argument(
        "--token-file", type=Path, required=True, help="a file with the plan's token"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="where to keep rows here too")
    options = parser.parse_args(arguments)
    host, colon, port = options.master.rpartition(":")
    if not colon or not port.isdigit():
        raise ScenarioError(f"--master {options.master}: give HOST:PORT.")
    try:
        token = options.token_file.read_text().strip()
    except OSError as error:
        raise ScenarioError(f"cannot read {options.token_file}: {error.strerror}.") from error
    keep_path = str(options.keep) if options.keep else None
    return WorkerConfig(host=host, port=int(port), token=token, keep_path=keep_path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
