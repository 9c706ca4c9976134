"""The local testbed: one deployment live on this machine, its two clusters joined by the link.

The PD worker, the gateway and the load run at the link's near site, the PrfaaS worker at the far
site. Whatever one site wants of the other goes by ``link.expose``: KV, registrations and prompts
all cross the shaped link; what stays inside a cluster does not.
"""

import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness.core import PD, PRFAAS, EngineError, Instance, LoadError
from harness.deployment import Deployment
from harness.engine.config import LINK_SAMPLES_PERIOD_S, EngineConfig, InstanceConfig
from harness.gateway.config import GatewayConfig, WorkerAddress
from harness.gateway_settings import read_api_key
from harness.load.plan import Plan, write_plan
from harness.profile_file import ProfileSource
from harness.record.run_directory import Cell, RunDirectory
from harness.scenario import Scenario
from harness.scheduling.config import Policy, decode_batch, decode_step_s, policy_of
from harness.testbed.children import GRACE_S, Child, Children
from harness.testbed.sampler import LinkSampler
from harness.transport.socket_options import MAX_BDP_BYTES
from netem.testlink import Site, TestLink
from netem.variation import LinkSchedule
from netem.variation_run import Applied

READY_TIMEOUT_S = 60.0
#: From the order to start until the first planned instant, so that no process is late for it.
LEAD_S = 0.5
SAMPLE_PERIOD_WALL_S = 0.1
#: Without so many reports of its senders a link is taken to be down.
SILENT_REPORTS = 5

Progress = Callable[[int, int, int], None]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What the load process said at its end, the run's planned origin, and how the link changed
    since, in wall seconds."""

    start_mono_ns: int
    end_mono_ns: int
    completed: int
    failed: int
    unsent: int
    link_changes: tuple[Applied, ...]


class LocalTestbed:
    """Context manager: the workers and the gateway of one deployment are up while it is open."""

    def __init__(
        self,
        scenario: Scenario,
        deployment: Deployment,
        run: RunDirectory,
        cell: Cell,
        link: TestLink,
    ) -> None:
        self._scenario = scenario
        self._deployment = deployment
        self._run = run
        self._cell = cell
        self._link = link
        self._children = Children()
        self._secret_hex = secrets.token_hex(32)
        #: What the workers want as a bearer token, and where each is reached from the near site.
        self.worker_key = secrets.token_urlsafe(24)
        self.addresses: dict[str, tuple[str, int]] = {}
        #: What a client of the gateway shows as its bearer token: nobody else joins a run.
        key_file = scenario.gateway.api_key_file
        self.gateway_key = read_api_key(key_file) if key_file else secrets.token_urlsafe(24)
        self._gateway: Child | None = None
        self.gateway_port = 0
        #: TCP's settings in each cluster's network, for the record.
        self.tcp: dict[str, Any] = {}

    @property
    def priority(self) -> str:
        """The scheduling priority that its processes run at."""
        return self._children.priority

    def __enter__(self) -> Self:
        self._run.cell_path(self._cell).mkdir(parents=True, exist_ok=True)
        try:
            self._open()
        except BaseException:
            self._children.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._children.__exit__(kind, error, trace)

    def _open(self) -> None:
        instances = self._deployment.instances()
        by_cluster = {
            cluster: [i for i in instances if i.cluster == cluster] for cluster in (PD, PRFAAS)
        }
        workers = {
            cluster: self._start_worker(cluster, members)
            for cluster, members in by_cluster.items()
            if members
        }
        ready = {
            cluster: self._children.wait_for(worker, "ready", READY_TIMEOUT_S)
            for cluster, worker in workers.items()
        }
        self.tcp = {cluster: answer["tcp"] for cluster, answer in ready.items()}
        addresses = {
            instance.name: self._near_view(
                instance, int(ready[instance.cluster]["ports"][instance.name])
            )
            for instance in instances
        }
        self.addresses = addresses
        for cluster, worker in workers.items():
            routes = self._kv_routes(cluster, int(ready[cluster]["kv_port"]), instances)
            worker.tell({"kv_routes": routes})
            self._children.wait_for(worker, "routed", READY_TIMEOUT_S)
        self._gateway = self._start_gateway(instances, addresses)
        port = self._children.wait_for(self._gateway, "ready", READY_TIMEOUT_S)["port"]
        self.gateway_port = int(port)

    def _kv_routes(
        self, cluster: str, kv_port: int, instances: tuple[Instance, ...]
    ) -> dict[str, tuple[str, int]]:
        """Where instances of the other cluster, by their addresses, reach a worker's receiver."""
        others = [one.name for one in instances if one.cluster != cluster]
        if not kv_port or not others:
            return {}
        site = self._link.far if cluster == PRFAAS else self._link.near
        across = self._link.expose(site, kv_port)
        return {"{}:{}".format(*self.addresses[name]): across for name in others}

    def _near_view(self, instance: Instance, port: int) -> tuple[str, int]:
        if instance.cluster == PRFAAS:
            return self._link.expose(self._link.far, port)
        return self._link.near.address, port

    def _spool(self, name: str) -> str:
        return str(self._run.spool_path(self._cell, name).absolute())

    def _log(self, name: str) -> Path:
        return self._run.cell_path(self._cell) / f"{name}.log"

    def _profiles(self) -> dict[str, ProfileSource]:
        return {
            name: ProfileSource(str(hardware.profile.path.absolute()), hardware.extrapolate)
            for name, hardware in self._scenario.hardware.items()
        }

    def _start_worker(self, cluster: str, instances: list[Instance]) -> Child:
        scenario, scale = self._scenario, self._scenario.scale
        site = self._link.far if cluster == PRFAAS else self._link.near
        # Inside the PD cluster KV goes over the fabric, whose rate is each sender's own NIC.
        to_wire = scale.time / scale.bytes
        fabric_bytes_per_s = scenario.fabric.rate_bytes_per_s * to_wire
        pacing = scenario.transport.pacing_bytes_per_s
        config = EngineConfig(
            cluster=cluster,
            address=site.address,
            own_network=site.namespace is not None,
            instances=[InstanceConfig(i.name, i.role, i.hardware) for i in instances],
            profiles=self._profiles(),
            architecture=str(scenario.model.architecture.path.absolute()),
            kv_dtype=scenario.model.architecture.kv_dtype,
            time_scale=scale.time,
            byte_scale=scale.bytes,
            seed=scenario.load.seed,
            admission=scenario.scheduling.admission,
            admission_deadline_s=scenario.scheduling.admission_deadline_s,
            stream_interval_tokens=scenario.testbed.stream_interval_tokens,
            connections=scenario.transport.connections,
            layerwise=scenario.transport.layerwise,
            checksum=scenario.transport.checksum,
            chunk_bytes=scenario.transport.chunk_bytes,
            io_threads=scenario.transport.io_threads,
            striping=scenario.transport.striping,
            congestion_control=scenario.transport.congestion_control,
            pacing_bytes_per_s=(
                (None if pacing is None else pacing * to_wire)
                if cluster == PRFAAS
                else fabric_bytes_per_s
            ),
            bdp_bytes=round(min(max(self._link.applied.bdp_bytes, 1), MAX_BDP_BYTES)),
            fabric_bytes_per_s=scenario.fabric.rate_bytes_per_s,
            prefix_cache=scenario.prefix_cache,
            convertible=scenario.scheduling.role_conversion and cluster == PD,
            decode_step_s=decode_step_s(scenario, self._deployment),
            decode_max_batch=decode_batch(scenario, self._deployment),
            transfer_deadline_wall_s=self._timeout_wall_s(),
            sample_period_wall_s=SAMPLE_PERIOD_WALL_S,
            **self._receiver_bounds(),
            secret_hex=self._secret_hex,
            api_key=self.worker_key,
            engines_spool=self._spool("engines"),
            link_spool=self._spool("link"),
        )
        name = f"worker-{cluster}"
        child = self._start(name, site, ["-m", "harness.engine"])
        child.tell(config)
        return child

    def _receiver_bounds(self) -> dict[str, int]:
        """Connections and buffers of a decode worker when every prefill instance sends to it."""
        scenario = self._scenario
        instances = self._deployment.instances()
        senders = sum(one.role == "prefill" for one in instances)
        if scenario.scheduling.role_conversion or scenario.prefix_cache.enabled:
            senders = len(instances)  # one that decodes may come to prefill, or send a copy
        longest = scenario.model.architecture.kv_bytes(scenario.workload.max_tokens)
        return {
            "max_connections": max(1024, 2 * senders * scenario.transport.connections),
            "max_buffer_bytes": max(2**30, round(2 * senders * longest / scenario.scale.bytes)),
        }

    def _start(self, name: str, site: Site, arguments: list[str]) -> Child:
        blame = LoadError if name == "load" else EngineError
        rank = 0
        if self._scenario.testbed.realtime and sys.platform == "linux":
            # Downstream first: what is nearest to the first token must not wait for new arrivals.
            rank = 2 if name.startswith("worker") else 1
        return self._children.start(name, site.popen, arguments, self._log(name), blame, rank)

    def _start_gateway(
        self, instances: tuple[Instance, ...], addresses: dict[str, tuple[str, int]]
    ) -> Child:
        scenario, given = self._scenario, self._scenario.gateway
        config = GatewayConfig(
            host=self._link.near.address,
            port=scenario.testbed.gateway_port,
            model=scenario.model.name,
            workers=[
                WorkerAddress(i.name, i.cluster, i.role, i.hardware, *addresses[i.name])
                for i in instances
            ],
            profiles=self._profiles(),
            architecture=str(scenario.model.architecture.path.absolute()),
            kv_dtype=scenario.model.architecture.kv_dtype,
            policy=self._policy(),
            time_scale=scenario.scale.time,
            byte_scale=scenario.scale.bytes,
            request_timeout_wall_s=self._timeout_wall_s(),
            api_key=self.gateway_key,
            worker_key=self.worker_key,
            gateway_spool=self._spool("gateway"),
            decisions_spool=self._spool("decisions"),
            link_spool=self._spool("link"),
            timeouts=given.timeouts,
            max_retries=given.max_retries,
            max_body_bytes=given.max_body_bytes,
            tokenizer=str(given.tokenizer.absolute()) if given.tokenizer else None,
        )
        child = self._start("gateway", self._link.near, ["-m", "harness.gateway"])
        child.tell(config)
        return child

    def _policy(self) -> Policy:
        """The deployment's policy over the link as it was built."""
        policy, scale = policy_of(self._scenario, self._deployment), self._scenario.scale
        applied = self._link.applied
        return replace(
            policy,
            dispatch_delay_s=applied.near_to_far.delay_s * scale.time,
            kv_delay_s=applied.far_to_near.delay_s * scale.time,
            link_silence_s=max(
                policy.link_silence_s, SILENT_REPORTS * LINK_SAMPLES_PERIOD_S * scale.time
            ),
        )

    def _timeout_wall_s(self) -> float:
        return self._scenario.testbed.request_timeout_s / self._scenario.scale.time

    def replay(
        self,
        salt: str,
        progress: Progress,
        started: Callable[[int], None],
        address: tuple[str, int] | None = None,
    ) -> LoadResult:
        """Replay the run's schedule through the gateway; ``started`` is told the planned origin.

        ``address`` is where the load finds the gateway, if not at its own address.
        """
        assert self._gateway is not None
        host, port = address or (self._link.near.address, self.gateway_port)
        plan = Plan(
            host=host,
            port=port,
            path="/v1/completions",
            api_key=self.gateway_key,
            model=self._scenario.model.name,
            time_scale=self._scenario.scale.time,
            schedule_path=str(self._run.schedule_path.absolute()),
            spool_path=self._spool("client"),
            salt=salt,
            request_timeout_s=self._timeout_wall_s(),
        )
        plan_path = self._run.cell_path(self._cell) / "plan.json"
        try:
            write_plan(plan, plan_path)
            load = self._start("load", self._link.near, ["-m", "harness.load", str(plan_path)])
            self._children.wait_for(load, "ready", READY_TIMEOUT_S)
        finally:
            plan_path.unlink(missing_ok=True)  # it holds the gateway's key
        start_ns = time.monotonic_ns() + round(LEAD_S * 1e9)
        with (
            LinkSampler(self._link, Path(self._spool("link"))) as sampler,
            self._link.run_schedule(self._link_schedule(), start_ns / 1e9) as variation,
        ):
            started(start_ns)
            self._gateway.tell({"start_mono_ns": start_ns})
            load.tell({"start_mono_ns": start_ns})
            last_s = self._run.read_schedule()[-1].planned_s / self._scenario.scale.time
            patience_s = LEAD_S + last_s + self._timeout_wall_s() + GRACE_S
            finished = self._follow(load, sampler, progress, time.monotonic() + patience_s)
        if finished["unsent"]:
            raise LoadError(
                f"the load stopped with {finished['unsent']} requests unsent, which nobody asked "
                f"it to; {load.last_words()}"
            )
        end_ns = time.monotonic_ns()
        self._children.stop(load)
        return LoadResult(
            start_ns,
            end_ns,
            finished["completed"],
            finished["failed"],
            finished["unsent"],
            variation.log,
        )

    def _link_schedule(self) -> LinkSchedule:
        """The link's changes on the wall clock; none where it is steady."""
        scale, schedule = self._scenario.scale, self._scenario.link_schedule
        return LinkSchedule(()) if schedule is None else schedule.scaled(scale.time, scale.bytes)

    def _follow(
        self, load: Child, sampler: LinkSampler, progress: Progress, deadline_s: float
    ) -> dict[str, int]:
        """Watch everything until the load has finished; what dies or hangs ends the run."""
        while (left_s := deadline_s - time.monotonic()) > 0:
            if sampler.error is not None:
                raise sampler.error
            news = self._children.next_event(min(left_s, 1.0))
            if news is None:
                continue
            child, event = news
            if child is load and event["event"] == "progress":
                progress(event["sent"], event["completed"], event["failed"])
            elif child is load and event["event"] == "finished":
                return event
        raise LoadError(
            f"the load did not end in time: every request should have by now, whatever became "
            f"of it; {load.last_words()}"
        )
