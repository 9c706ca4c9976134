"""Several workers under one Locust master: started, let in, given their parts, brought home.

The master is this process; it sends no request itself. Worker k replays the requests whose index
is k modulo the number of workers, so that the merged schedule and records do not depend on it. Of a
closed loop each worker has its share of the slots.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import gevent
import msgspec
from gevent import subprocess
from locust.stats import RequestStats

from harness import child
from harness.core import LoadError
from harness.load import control
from harness.load.admission import new_nonce
from harness.load.clocks import clock_identity
from harness.load.crew import Crew, Member
from harness.load.master import LoadMaster
from harness.load.plan import Plan, worker_path
from harness.load.schedule import Shard
from harness.load.spool import Spool
from harness.load.statistics import check_statistics
from harness.load.user import ReplayEnvironment
from harness.load.web import web_ui
from harness.load.worker import Assignment, WorkerConfig

#: Interpreter and imports, wall time; a remote worker is started by a person.
JOIN_S, REMOTE_JOIN_S = 120.0, 600.0
#: Prompts of a million tokens are built in a second or two.
PREPARE_S = 120.0
_GONE_S = 5.0
KINDS = ("listening", "prepared", "progress", "ended", "rows", "sample", "broken", "clock")


@contextmanager
def crew_of(plan: Plan, schedule: Shard, stdout: int) -> Iterator[tuple[Crew, ReplayEnvironment]]:
    """Workers with their parts, ready for ``start_at``; none is left at the end.

    The crew may have been halted meanwhile; then nothing was or will be sent. Raises PrfaasError.
    """
    token = plan.token or new_nonce().hex()
    crew = Crew(
        [
            Member(
                worker,
                worker < plan.workers,
                Path(worker_path(plan.spool_path, worker, plan.num_workers)),
            )
            for worker in range(plan.num_workers)
        ]
    )
    environment = ReplayEnvironment(None)
    environment.stats = RequestStats()  # with what the web UI shows over time
    environment.parsed_options = None  # the web UI would show those of a command line
    identity = clock_identity()
    runner = LoadMaster(
        environment,
        plan.bind_host,
        plan.bind_port,
        token,
        lambda name, said: crew.admit(name, said, identity),
    )
    environment.runner = crew.runner = runner
    for kind in KINDS:
        runner.register_message(kind, lambda msg, **_: crew.heard(msg.node_id, msg.type, msg.data))
    watcher = gevent.spawn(crew.watch)
    with ExitStack() as stack:
        stack.callback(_end, crew, runner)
        stack.callback(watcher.kill)
        stack.enter_context(control.stopped_by_signals(crew))
        for member in crew.members[: plan.workers]:
            member.process = _start(member.worker, plan, runner.port, token)
        if plan.remote_workers:
            print(
                f"harness.load: waiting for {plan.remote_workers} workers at "
                f"{plan.bind_host}:{runner.port}",
                file=sys.stderr,
            )
        if plan.web_fd is not None:
            stack.enter_context(web_ui(environment, plan.web_fd))
        if not _bring_together(crew, runner, plan, schedule, stack, stdout):
            crew.give_up()
        yield crew, environment


def finish(crew: Crew, environment: ReplayEnvironment, plan: Plan, stdout: int) -> None:
    """After the run: clocks once more, Locust's counts, and what became of each worker."""
    crew.measure_clocks("clock_after")
    if not crew.lost:  # what a lost worker had not reported, Locust never hears
        check_statistics(environment.stats, plan.path, crew.num_completed, crew.num_failed)
    faults = crew.clock_faults()
    for member in crew.members:
        said = control.WorkerAfter(
            member.worker,
            member.lost,
            member.clock_after.offset_ns,
            member.clock_after.bound_ns,
            faults.get(member.worker),
        )
        control.emit_surely(stdout, said, crew)


def _bring_together(
    crew: Crew, runner: LoadMaster, plan: Plan, schedule: Shard, stack: ExitStack, stdout: int
) -> bool:
    """False where the run was halted on the way."""
    patience_s = REMOTE_JOIN_S if plan.remote_workers else JOIN_S
    if not crew.wait_until("listening", patience_s, "join"):
        return False
    crew.measure_clocks("clock")
    for member in crew.members:
        shard = schedule.part(member.worker, plan.num_workers)
        member.num_planned = len(shard)
        _assign(member, runner, plan, shard, stack)
    if not crew.wait_until("prepared", PREPARE_S, "build their prompts"):
        return False
    # One that was silent for a moment counts as missing, and would get no user.
    with gevent.Timeout(JOIN_S, LoadError("a load worker that was ready has gone silent.")):
        while len(runner.clients.ready) < plan.num_workers and not crew.lost:
            gevent.sleep(0.01)
    # One user each, by Locust's own dispatch.
    runner.start(plan.num_workers, spawn_rate=plan.num_workers)
    with gevent.Timeout(JOIN_S, LoadError("Locust's users did not start on every worker.")):
        while not runner.all_running() and not crew.lost:
            gevent.sleep(0.01)
    for member in crew.members:
        clock = member.clock
        said = control.Worker(
            member.worker,
            member.host,
            member.num_planned,
            member.shared_clock,
            clock.offset_ns,
            clock.bound_ns,
        )
        control.emit_surely(stdout, said, crew)
    return True


def _start(worker: int, plan: Plan, port: int, token: str) -> "subprocess.Popen[bytes]":
    """A worker of this host; its configuration has the token, so it goes in by stdin."""
    process = subprocess.Popen(
        [sys.executable, "-m", "harness.load", "worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    host = "127.0.0.1" if plan.bind_host in {"0.0.0.0", "*"} else plan.bind_host
    config = WorkerConfig(host=host, port=port, token=token, worker=worker)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config) + b"\n")
    process.stdin.flush()
    return process


def _assign(member: Member, runner: LoadMaster, plan: Plan, shard: Shard, stack: ExitStack) -> None:
    workers = plan.num_workers
    samples_path = (
        None
        if plan.samples_path is None
        else worker_path(plan.samples_path, member.worker, workers)
    )
    if not member.here:
        member.spool = stack.enter_context(Spool(member.spool_path))
        if samples_path is not None:
            member.samples = stack.enter_context(child.Spool(samples_path))
    slots = None
    if plan.concurrency is not None:
        slots = len(range(member.worker, plan.concurrency, workers))
    part = Assignment(
        worker=member.worker,
        plan=msgspec.structs.replace(plan, token=None),
        shard=shard.to_bytes(),
        slots=slots,
        spool_path=str(member.spool_path) if member.here else None,
        samples_path=samples_path if member.here else None,
    )
    runner.send_message("assignment", {"bytes": msgspec.msgpack.encode(part)}, member.name)


def _end(crew: Crew, runner: LoadMaster) -> None:
    """Release the workers and see them gone; one that does not go is killed."""
    runner.quit()
    runner.server.close(linger=0)
    for member in crew.members:
        if member.process is None:
            continue
        assert member.process.stdin is not None
        member.process.stdin.close()
        try:
            member.process.wait(_GONE_S)
        except subprocess.TimeoutExpired:
            member.process.kill()
            member.process.wait()
