"""``python -m harness.load worker``: one Locust worker, which replays its part of the schedule.

Everything that takes long, prompts above all, is built in a thread while heartbeats go on. A worker
of the master's host is started by the master, is told all in one line on stdin, writes its own
spool, and ends with its stdin. One of another host is started by hand, keeps its rows in a file of
its own and sends them to the master too. Without its master a worker stops and keeps what it has.
"""

import gc
import platform
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import gevent
import msgspec
from gevent.event import AsyncResult, Event
from locust import __version__ as locust_version
from locust.env import Environment
from locust.rpc import Message
from locust.runners import WorkerRunner

from harness import child
from harness.core import LoadError, PrfaasError
from harness.load.admission import new_nonce, proof, proves
from harness.load.client import Client, allow_open_files
from harness.load.clocks import clock_identity
from harness.load.plan import Plan
from harness.load.prompts import PromptPool
from harness.load.replay import Replay, RowSink
from harness.load.samples import Sample, sample
from harness.load.schedule import Shard
from harness.load.spool import Row, Spool
from harness.load.user import ReplayEnvironment

PROGRESS_S = 0.5
#: How long to try to reach the master.
CONNECT_S = 120.0
#: A master that says nothing for so long is gone; it answers every heartbeat, one a second.
SILENT_S = 15.0


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a worker is told: where its master is, and what it must know to join.

    ``worker`` is its number, None: the next that is free. ``keep_path``: where a worker of another
    host keeps its rows.
    """

    host: str
    port: int
    token: str
    worker: int | None = None
    keep_path: str | None = None


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's part: its number, its shard's columns, and where it writes on this host."""

    worker: int
    plan: Plan
    shard: bytes
    slots: int | None
    spool_path: str | None
    samples_path: str | None


class LoadWorker(WorkerRunner):  # type: ignore[misc]  # locust is not checked here
    """Locust's worker behind the master's entrance. LoadError when it is not let in."""

    def __init__(self, environment: Environment, config: WorkerConfig) -> None:
        self._config = config
        self._nonce = new_nonce()
        self._challenge = b""
        self._answered = Event()
        self._refusal: str | None = None
        self._welcome = False
        self._heard_s = time.monotonic()
        self.released = Event()
        #: Set when the run is to end before its schedule does; what ended it, if an error.
        self.halted = AsyncResult()
        super().__init__(environment, config.host, config.port)

    def connect_to_master(self) -> None:
        give_up_s = time.monotonic() + CONNECT_S
        self.client.send(Message("client_ready", locust_version, self.client_id))
        while not self._answered.wait(1.0):
            if time.monotonic() > give_up_s:
                raise LoadError(
                    f"no master answers at {self.master_host}:{self.master_port}; start it first, "
                    "and give a worker the address that it binds."
                )
            self.client.send(Message("client_ready", locust_version, self.client_id))
        if self._refusal is not None:
            raise LoadError(
                f"the master at {self.master_host}:{self.master_port} refuses this worker: "
                f"{self._refusal}."
            )
        self.connected = True

    def heartbeat_timeout_checker(self) -> None:
        while True:
            gevent.sleep(1)
            if time.monotonic() - self._heard_s > SILENT_S and not self.halted.ready():
                self.halted.set(
                    LoadError(f"the master has said nothing for {SILENT_S:g} s; the worker stops.")
                )

    def handle_message(self, msg: Message) -> None:
        self._heard_s = time.monotonic()
        if msg.type == "challenge":
            self._register(msg.data["nonce"])
        elif msg.type == "refused":
            self._refuse(str(msg.data["why"]))
        elif msg.type == "welcome":
            arguments = (self._config.token, "master", self._challenge, self._nonce)
            if proves(msg.data["proof"], *arguments, self.client_id):
                self._welcome = True
                self._answered.set()
            else:
                self._refuse("it is not this run's master: it does not know the token")
        elif not self._welcome or msg.type == "stop":
            pass  # from whoever sits at that address; Locust's own stop never is ours
        elif msg.type == "quit":
            self.released.set()
        elif msg.type == "clock":
            answer = {"number": msg.data["number"], "mono_ns": time.monotonic_ns()}
            self.send_message("clock", answer)
        else:
            super().handle_message(msg)

    def wait_for_release(self) -> None:
        """Until the master lets go of all, or is silent: other workers may take long yet."""
        while not self.released.wait(1.0) and time.monotonic() - self._heard_s <= SILENT_S:
            pass

    def close(self) -> None:
        """Let the connection go; what has not left has a second more."""
        self.greenlet.kill(block=True)
        self.client.close(linger=1000)

    def _register(self, challenge: bytes) -> None:
        self._challenge = challenge
        shown = proof(self._config.token, "worker", challenge, self._nonce, self.client_id)
        self.send_message(
            "register",
            {
                "nonce": self._nonce,
                "proof": shown,
                "worker": self._config.worker,
                "host": platform.node(),
                "clock": clock_identity(),
            },
        )

    def _refuse(self, why: str) -> None:
        self._refusal = why
        self._answered.set()


class _Carrier:
    """Rows and samples of a worker of another host: kept here, and sent to the master in batches.

    A row that is in the master's hands is in the run, whatever becomes of this host.
    """

    def __init__(self, runner: LoadWorker, keep: Spool) -> None:
        self._runner = runner
        self._keep = keep
        self._rows: list[bytes] = []
        self._encode = msgspec.json.Encoder().encode

    def append(self, row: Row) -> None:
        self._keep.append(row)
        self._rows.append(self._encode(row))

    def sample(self, one: Sample) -> None:
        self._runner.send_message("sample", {"line": self._encode(one)})

    def flush(self) -> None:
        rows, self._rows = self._rows, []
        if rows:
            self._runner.send_message("rows", {"lines": rows})


def run_worker(config: WorkerConfig, joined: Callable[[LoadWorker], None]) -> None:
    """Join, replay, and stay until released. Raises PrfaasError.

    ``joined`` is called once the master has let the worker in.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal's group; the master decides
    environment = ReplayEnvironment(None)
    assigned = AsyncResult()
    runner = LoadWorker(environment, config)
    environment.runner = runner
    begun = AsyncResult()
    runner.register_message("assignment", lambda msg, **_: assigned.set(msg.data["bytes"]))
    runner.register_message("begin", lambda msg, **_: begun.set(msg.data["start_mono_ns"]))
    runner.register_message("halt", lambda **_: runner.halted.set(None))
    watcher = gevent.signal_handler(signal.SIGTERM, runner.halted.set, None)
    try:
        joined(runner)
        runner.send_message("listening")
        gevent.wait([assigned, runner.halted], count=1)
        if not assigned.ready():
            raise runner.halted.get() or LoadError("the run ended before this worker had a part.")
        assignment = msgspec.msgpack.decode(assigned.get(), type=Assignment)
        _replay(runner, environment, assignment, begun, config.keep_path)
    except PrfaasError as error:
        runner.send_message("broken", {"why": str(error), "status": error.exit_status})
        raise
    finally:
        watcher.cancel()
        runner.close()


def _replay(
    runner: LoadWorker,
    environment: ReplayEnvironment,
    assignment: Assignment,
    begun: AsyncResult,
    keep_path: str | None,
) -> None:
    plan, shard = assignment.plan, Shard.from_bytes(assignment.shard)
    allow_open_files()
    client = gevent.get_hub().threadpool.apply(_build_client, (plan, shard))
    spool_path = assignment.spool_path or keep_path or f"prfaas-load-{assignment.worker}.jsonl"
    with ExitStack() as stack:
        stack.callback(client.close)
        spool = stack.enter_context(Spool(Path(spool_path)))
        carrier = _Carrier(runner, spool) if assignment.spool_path is None else None
        sink: RowSink = carrier or spool
        replay = Replay(plan, shard, client, sink, assignment.slots)
        environment.replay = replay
        gc.collect()
        gc.freeze()
        runner.send_message("prepared")
        greenlets = [
            gevent.spawn(_obey, runner, replay, begun),
            gevent.spawn(_report, runner, replay, carrier),
            gevent.spawn(
                sample, replay, assignment.worker, _sample_sink(assignment, carrier, stack)
            ),
        ]
        for greenlet in greenlets:
            greenlet.link_exception(lambda failed: replay.fail(failed.exception))
        try:
            replay.wait()
        finally:
            gevent.killall(greenlets)
            if carrier is not None:
                carrier.flush()
    # What Locust's own report holds goes first: who hears that this worker is done has it all.
    runner._send_stats()
    runner.send_message("ended", _counts(replay) | {"lags_ns": replay.lags_ns.tobytes()})
    runner.wait_for_release()


def _build_client(plan: Plan, shard: Shard) -> Client:
    longest = int(shard.input_tokens.max()) if len(shard) else 1
    return Client(plan, PromptPool(plan.salt, longest))


def _obey(runner: LoadWorker, replay: Replay, begun: AsyncResult) -> None:
    """Start when the master says so; stop when it does or is gone, also before Locust's user is
    there to write the rows."""
    gevent.wait([begun, runner.halted], count=1)
    if not runner.halted.ready():
        replay.start_at(begun.get())
    error = runner.halted.get()
    if error is None:
        replay.stop()
    else:
        replay.fail(error)
    replay.run(_unheard)


def _unheard(_: object) -> None:
    """Nobody asked for it."""


def _report(runner: LoadWorker, replay: Replay, carrier: _Carrier | None) -> None:
    """Tell the master how far it is, twice a second. A greenlet of its own."""
    while True:
        gevent.sleep(PROGRESS_S)
        if carrier is not None:
            carrier.flush()
        runner.send_message("progress", _counts(replay))


def _counts(replay: Replay) -> dict[str, int]:
    return {
        "sent": replay.num_sent,
        "completed": replay.num_completed,
        "failed": replay.num_failed,
        "unsent": replay.num_unsent,
    }


def _sample_sink(
    assignment: Assignment, carrier: _Carrier | None, stack: ExitStack
) -> Callable[[Sample], None]:
    if carrier is not None:
        return carrier.sample
    if assignment.samples_path is None:
        return _unheard
    return stack.enter_context(child.Spool(assignment.samples_path)).write
