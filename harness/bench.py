"""The main job: every deployment of a scenario live on the same arrivals, one after another.

Before the run the schedule is fixed, the throughput model solved and the same schedule simulated;
the link is built and measured once. Then each deployment is brought up, loaded and taken down;
repeats interleave their order. Whatever happens, what was recorded is joined, judged and reported.
"""

import contextlib
import dataclasses
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.architecture import wire_layer_bytes
from harness.core import LinkError, PrfaasError
from harness.link_fidelity import check_ceiling, fidelity, fidelity_after, late_changes
from harness.machine import describe_clocks, describe_machine, describe_versions
from harness.preparation import Prepared
from harness.record.run_directory import Cell, Manifest, RunDirectory
from harness.record.spool import ExpectedRow, SimulatedRow
from harness.record.tables import compact, write_expected, write_simulated
from harness.report import write_report
from harness.scenario import scenario_hash, to_manifest
from harness.simulator import Simulation
from harness.testbed.local import LocalTestbed
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
    prepared: Prepared, runs_root: Path, repeats: int, say: Say, progress: Progress
) -> BenchResult:
    """Run every deployment live. Ends with a verdict and a report even when the run does not."""
    scenario = prepared.scenario
    run = RunDirectory.create(runs_root, scenario.name, datetime.now(UTC))
    log = ManifestLog(run, _manifest(prepared, run, repeats))
    _write_plans(run, prepared)
    error: PrfaasError | None = None
    try:
        _run_cells(prepared, run, log, say, progress)
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


def _run_cells(
    prepared: Prepared, run: RunDirectory, log: ManifestLog, say: Say, progress: Progress
) -> None:
    scenario = prepared.scenario
    scale = scenario.scale
    asked = scenario.link.scaled(scale.time, scale.bytes)
    with open_link(asked, scenario.testbed.link_backend) as link:
        say(f"link: {link.backend}, {link.applied}")
        for note in link.notes:
            say(f"link: {note}")
        log.change(**fidelity(scenario, link, check_ceiling(scenario, link)))
        for cell in log.manifest.deployments:
            say(f"{cell.name}: starting workers and gateway")
            deployment = scenario.deployments[cell.deployment]
            with LocalTestbed(scenario, deployment, run, cell, link) as testbed:
                told = {"priority": testbed.priority, "tcp": testbed.tcp}
                notes = (*log.manifest.link_notes, *_small_buffers(testbed.tcp))
                log.change(
                    machine=log.manifest.machine | told, link_notes=tuple(dict.fromkeys(notes))
                )

                def on_progress(sent: int, done: int, failed: int, name: str = cell.name) -> None:
                    progress(name, len(prepared.schedule), sent, done, failed)

                def on_start(start_ns: int, cell: Cell = cell) -> None:
                    log.put(log.manifest.started(cell.deployment, cell.repeat, start_ns))

                result = testbed.replay(f"{run.path.name}/{cell.name}", on_progress, on_start)
            log.put(log.manifest.ended(cell.deployment, cell.repeat, result.end_mono_ns))
            _log_changes(log, cell, result.link_changes)
            say(
                f"{cell.name}: {result.completed} completed, {result.failed} failed, "
                f"{result.unsent} unsent"
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
                kv_wire_bytes_expected=sum(
                    wire_layer_bytes(
                        architecture.layer_kv_bytes(request.input_tokens), scenario.scale.bytes
                    )
                ),
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
