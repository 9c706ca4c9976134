"""The main job: every deployment of a scenario live on the same arrivals, one after another.

Before the run the schedule is fixed, the throughput model solved and the same schedule simulated;
the link is built and measured once. Then each deployment is brought up, loaded and taken down;
repeats interleave their order. Whatever happens, what was recorded is joined, judged and reported.
"""

import contextlib
import dataclasses
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.architecture import wire_layer_bytes
from harness.core import LinkError, LoadError, PrfaasError
from harness.engine_settings import Engine
from harness.engine_traffic import counted_kv_bytes
from harness.link_fidelity import check_ceiling, fidelity, fidelity_after, late_changes
from harness.machine import describe_clocks, describe_machine, describe_versions
from harness.preparation import Prepared
from harness.record.run_directory import Cell, Manifest, RunDirectory
from harness.record.spool import ExpectedRow, SimulatedRow
from harness.record.tables import compact, write_expected, write_simulated
from harness.report import write_report
from harness.scenario import Scenario, scenario_hash, to_manifest
from harness.simulator import Simulation
from harness.testbed.loading import LoadResult
from harness.testbed.local import LocalTestbed
from harness.testbed.self_testing import refusal, self_test, summary
from harness.testbed.sglang import UNMEASURED, unused_link
from harness.verdict import Verdict, judge
from netem.link import LinkError as NetemLinkError
from netem.testlink import open_link
from netem.variation_run import Applied

Say = Callable[[str], None]
Progress = Callable[[str, int, int, int, int], None]


@dataclass(frozen=True, slots=True)
class BenchResult:
    """Where a run lies and what it says; ``error`` is what ended it early."""

    run: RunDirectory
    verdict: Verdict
    error: PrfaasError | None

    @property
    def exit_status(self) -> int:
        """As the design has it: 3 where the testbed died, else the verdict's 0 or 1."""
        return self.error.exit_status if self.error is not None else self.verdict.exit_status


def bench(
    prepared: Prepared,
    runs_root: Path,
    repeats: int,
    say: Say,
    progress: Progress,
    web_port: int | None = None,
) -> BenchResult:
    """Run every deployment live. Ends with a verdict and a report even when the run does not.

    With a ``web_port`` (0: any that is free) Locust's web UI shows the load on the loopback.
    """
    scenario = prepared.scenario
    run = RunDirectory.create(runs_root, scenario.name, datetime.now(UTC))
    log = ManifestLog(run, _manifest(prepared, run, repeats))
    _write_plans(run, prepared)
    error: PrfaasError | None = None
    try:
        _self_test(prepared, run, log, say)
        with web_listener(web_port, say) as web_fd:
            _run_cells(prepared, run, log, say, progress, web_fd)
        log.change(status="finished")
    except KeyboardInterrupt:
        log.change(status="interrupted", error="interrupted by Ctrl-C or a signal to end")
    except NetemLinkError as failure:
        error = LinkError(str(failure))
        log.change(status="failed", error=str(failure))
    except PrfaasError as failure:
        error = failure
        log.change(status="failed", error=str(failure))
    except OSError as failure:
        error = PrfaasError(f"cannot read or write {failure.filename}: {failure.strerror}")
        log.change(status="failed", error=str(error))
    except BaseException as failure:
        with contextlib.suppress(OSError, PrfaasError):  # the first failure is the one to see
            log.change(status="failed", error=f"{type(failure).__name__}: {failure}")
        raise
    with uninterrupted():
        say("joining records, judging, writing the report")
        compact(run)
        verdict = judge(run)
        write_report(run)
    return BenchResult(run, verdict, error)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """A second Ctrl-C must not cost what the first one left; joining records takes seconds."""
    signums = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {signum: signal.signal(signum, signal.SIG_IGN) for signum in signums}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class ManifestLog:
    """The manifest as it stands; every change is on disk before the run goes on."""

    def __init__(self, run: RunDirectory, manifest: Manifest) -> None:
        self._run = run
        self.manifest = manifest
        run.write_manifest(manifest)

    def change(self, **fields: Any) -> None:
        """Replace fields of the manifest."""
        self.put(dataclasses.replace(self.manifest, **fields))

    def put(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._run.write_manifest(manifest)


def _self_test(prepared: Prepared, run: RunDirectory, log: ManifestLog, say: Say) -> None:
    """Refuse to run, by a LoadError, with a client that cannot keep the schedule."""
    if not prepared.scenario.testbed.self_test:
        log.change(load_self_test={"skipped": "testbed.self_test is false"})
        return
    say("self-test: the load against a server of known truth")
    result = self_test(prepared.scenario, prepared.schedule, run.path / "spool" / "self-test")
    log.change(load_self_test=result)
    say(f"self-test: {summary(result)}")
    if result["fault"] is not None:
        raise LoadError(refusal(result))


@contextlib.contextmanager
def web_listener(port: int | None, say: Say) -> Iterator[int | None]:
    """A listening socket of this network for the load's web UI, whichever network the load is in;
    it stays while loads come and go. None without a port."""
    if port is None:
        yield None
        return
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        raise LoadError(
            f"--web: port {port} cannot be had ({error.strerror}); leave the number out for any "
            "that is free."
        ) from error
    with listener:
        say(f"Locust's web UI while load runs: http://127.0.0.1:{listener.getsockname()[1]}")
        yield listener.fileno()


def _run_cells(
    prepared: Prepared,
    run: RunDirectory,
    log: ManifestLog,
    say: Say,
    progress: Progress,
    web_fd: int | None,
) -> None:
    scenario = prepared.scenario
    scale = scenario.scale
    unused = unused_link(scenario)
    asked = unused or scenario.link.scaled(scale.time, scale.bytes)
    with open_link(asked, scenario.testbed.link_backend) as link:
        say(f"link: {link.backend}, {link.applied}")
        for note in link.notes:
            say(f"link: {note}")
        log.change(**fidelity(scenario, link, check_ceiling(scenario, link)))
        if unused is not None:
            log.change(link_failures=(*log.manifest.link_failures, UNMEASURED))
        for cell in log.manifest.deployments:
            say(f"{cell.name}: starting workers and gateway")
            deployment = scenario.deployments[cell.deployment]
            with LocalTestbed(scenario, deployment, run, cell, link, web_fd) as testbed:
                told = {"priority": testbed.priority, "tcp": testbed.tcp}
                notes = (*log.manifest.link_notes, *_small_buffers(testbed.tcp))
                log.change(
                    machine=log.manifest.machine | told,
                    versions=log.manifest.versions | testbed.versions,
                    link_notes=tuple(dict.fromkeys(notes)),
                    notes=tuple(dict.fromkeys((*log.manifest.notes, *testbed.engine_notes))),
                )

                def on_progress(sent: int, done: int, failed: int, name: str = cell.name) -> None:
                    progress(name, len(prepared.schedule), sent, done, failed)

                def on_start(start_ns: int, cell: Cell = cell) -> None:
                    log.put(log.manifest.started(cell.deployment, cell.repeat, start_ns))

                salt = _salt(run, cell, scenario.engine)
                result = testbed.replay(salt, on_progress, on_start)
            log.put(log.manifest.ended(cell.deployment, cell.repeat, result.end_mono_ns))
            _log_changes(log, cell, result.link_changes)
            _log_workers(log, cell, result)
            say(
                f"{cell.name}: {result.completed} completed, {result.failed} failed, "
                f"{result.unsent} unsent" + (f", {result.lost} lost" if result.lost else "")
            )
        after, failures = fidelity_after(link)
        log.change(link_check_after=after, link_failures=(*log.manifest.link_failures, *failures))


def _small_buffers(tcp: dict[str, Any]) -> list[str]:
    """What the kernel did not give the KV connections of each cluster."""
    return [
        f"KV connections of cluster {cluster} have {words}"
        for cluster, one in tcp.items()
        for words in one["lacking"]
    ]


def _log_workers(log: ManifestLog, cell: Cell, result: LoadResult) -> None:
    """Each of several load workers, and what a verdict must know of them."""
    manifest = log.manifest
    log.change(
        load_workers=(*manifest.load_workers, *({"cell": cell.name, **w} for w in result.workers)),
        load_workers_lost=(
            *manifest.load_workers_lost,
            *(f"{cell.name}: {lost}" for lost in result.workers_lost()),
        ),
        load_clock_faults=(
            *manifest.load_clock_faults,
            *(f"{cell.name}: {fault}" for fault in result.clock_faults()),
        ),
    )


def _log_changes(log: ManifestLog, cell: Cell, changes: Sequence[Applied]) -> None:
    """What a varying link became and when, in wall seconds from the load's start."""
    rows = [{"cell": cell.name, **dataclasses.asdict(change)} for change in changes]
    log.change(
        link_changes=(*log.manifest.link_changes, *rows),
        link_failures=(*log.manifest.link_failures, *late_changes(changes)),
    )


def _manifest(prepared: Prepared, run: RunDirectory, repeats: int) -> Manifest:
    scenario = prepared.scenario
    names = list(scenario.deployments)
    cells = []
    for repeat in range(repeats):
        # Repeats interleave their order, so that a drift of the machine favours none.
        order = names if repeat % 2 == 0 else names[::-1]
        cells += [Cell(name, repeat) for name in order]
    return Manifest(
        run_id=run.path.name,
        started_utc=datetime.now(UTC).isoformat(),
        started_mono_ns=time.monotonic_ns(),
        scenario=to_manifest(scenario),
        scenario_hash=scenario_hash(scenario),
        time_scale=scenario.scale.time,
        byte_scale=scenario.scale.bytes,
        deployments=tuple(cells),
        instances={name: one.instances() for name, one in scenario.deployments.items()},
        seeds={"load": scenario.load.seed},
        versions=describe_versions(),
        machine=describe_machine(),
        clocks=describe_clocks(),
        schedule=prepared.described_schedule(),
        models=prepared.models,
        notes=prepared.notes,
    )


def _write_plans(run: RunDirectory, prepared: Prepared) -> None:
    """Schedule, expectations and simulations: all that a report needs beside the spools."""
    scenario = prepared.scenario
    architecture = scenario.model.architecture
    run.write_schedule(prepared.schedule)
    write_expected(
        run,
        (
            ExpectedRow(
                rid=request.rid,
                kv_bytes_expected=architecture.kv_bytes(request.input_tokens),
                kv_wire_bytes_expected=_wire_bytes(scenario, request.input_tokens),
                prefill_s={
                    name: hardware.profile.prefill_s(request.input_tokens)
                    for name, hardware in scenario.hardware.items()
                },
                growing_bytes_per_token=architecture.moved_bytes(1, 0)
                - architecture.moved_bytes(1, 1),
            )
            for request in prepared.schedule
        ),
    )
    for name, simulation in prepared.simulations.items():
        write_simulated(run, name, _simulated_rows(simulation))


def _wire_bytes(scenario: Scenario, tokens: int) -> int:
    """What crosses for a prompt: layers scaled, or what a real engine counts of its pages."""
    architecture, sglang = scenario.model.architecture, scenario.engine.sglang
    if sglang is not None:
        assert sglang.page_size is not None, "a run on SGLang is refused without"
        return counted_kv_bytes(scenario, tokens)
    return sum(wire_layer_bytes(architecture.layer_kv_bytes(tokens), scenario.scale.bytes))


def _salt(run: RunDirectory, cell: Cell, engine: Engine) -> str:
    """Prompts of a cell are its own, so that no cache knows them. Engines that compute start anew
    for each cell: theirs are the same in all deployments, so that the answers can be compared."""
    return f"{run.path.name}/{cell.name if engine.kind == 'emulated' else f'r{cell.repeat}'}"


def _simulated_rows(simulation: Simulation) -> list[SimulatedRow]:
    rows = []
    for one in simulation.requests:
        if one.outcome != "completed":
            continue  # a request that fails in the model has no TTFT there
        assert one.route is not None
        assert one.prefill_queue_s is not None
        assert one.prefill_s is not None
        assert one.transfer_s is not None
        assert one.decode_admission_s is not None
        assert one.ttft_s is not None
        rows.append(
            SimulatedRow(
                rid=one.rid,
                prefill_queue_s=one.prefill_queue_s,
                prefill_s=one.prefill_s,
                transfer_s=one.transfer_s,
                decode_admission_s=one.decode_admission_s,
                ttft_s=one.ttft_s,
                e2e_s=one.e2e_s,
                prefill_instance=one.route.prefill.name,
                decode_instance=one.route.decode.name,
                kv_bytes=one.kv_bytes,
            )
        )
    return rows
