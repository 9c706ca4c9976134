"""The local testbed: one deployment live on this machine, its two clusters joined by the link.

The PD worker, the gateway and the load run at the link's near site, the PrfaaS worker at the far
site. Whatever one site wants of the other goes by ``link.expose``: KV, registrations and prompts
all cross the shaped link; what stays inside a cluster does not.
"""

import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from harness.core import PD, PRFAAS, EngineError, Instance
from harness.deployment import Deployment
from harness.engine.config import LINK_SAMPLES_PERIOD_S, EngineConfig, InstanceConfig
from harness.gateway.config import GatewayConfig, WorkerAddress
from harness.gateway_settings import read_api_key
from harness.profile_file import ProfileSource
from harness.record.run_directory import Cell, RunDirectory
from harness.scenario import Scenario
from harness.scheduling.config import Policy, decode_batch, decode_step_s, policy_of
from harness.testbed import reference, sglang
from harness.testbed.children import Child, Children
from harness.testbed.loading import Loading, LoadResult, Progress
from harness.transport.socket_options import MAX_BDP_BYTES
from netem.testlink import Site, TestLink

READY_TIMEOUT_S = 60.0
SAMPLE_PERIOD_WALL_S = 0.1
#: Without so many reports of its senders a link is taken to be down.
SILENT_REPORTS = 5


class LocalTestbed:
    """Context manager: the workers and the gateway of one deployment are up while it is open."""

    def __init__(
        self,
        scenario: Scenario,
        deployment: Deployment,
        run: RunDirectory,
        cell: Cell,
        link: TestLink,
        web_fd: int | None = None,
    ) -> None:
        self._scenario = scenario
        self._deployment = deployment
        self._run = run
        self._cell = cell
        self._link = link
        self._web_fd = web_fd
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
        #: Of real servers, by the name of the engine.
        self.versions: dict[str, str] = {}
        #: What an engine lacks or warns of, for the record.
        self.engine_notes: tuple[str, ...] = ()

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
        is_real = self._scenario.engine.kind == "sglang"
        opened = (self._open_servers if is_real else self._open_workers)(by_cluster, instances)
        self._gateway = self._start_gateway(opened)
        pairs = sum(one.role == "decode" for one in instances)
        patience_s = READY_TIMEOUT_S + (pairs * sglang.CANARY_TIMEOUT_S if is_real else 0.0)
        port = self._children.wait_for(self._gateway, "ready", patience_s)["port"]
        self.gateway_port = int(port)

    def _open_workers(
        self, by_cluster: dict[str, list[Instance]], instances: tuple[Instance, ...]
    ) -> list[WorkerAddress]:
        """Engines of our own: a process a cluster, which then learn where KV goes."""
        workers = {
            cluster: self._start_worker(cluster, members)
            for cluster, members in by_cluster.items()
            if members
        }
        computes = self._scenario.engine.reference
        patience_s = READY_TIMEOUT_S if computes is None else computes.ready_timeout_s
        ready = {
            cluster: self._children.wait_for(worker, "ready", patience_s)
            for cluster, worker in workers.items()
        }
        self.tcp = {cluster: answer["tcp"] for cluster, answer in ready.items()}
        self.addresses = {
            instance.name: self._near_view(
                instance, int(ready[instance.cluster]["ports"][instance.name])
            )
            for instance in instances
        }
        for cluster, worker in workers.items():
            routes = self._kv_routes(cluster, int(ready[cluster]["kv_port"]), instances)
            worker.tell({"kv_routes": routes})
            self._children.wait_for(worker, "routed", READY_TIMEOUT_S)
        return [
            WorkerAddress(i.name, i.cluster, i.role, i.hardware, *self.addresses[i.name])
            for i in instances
        ]

    def _open_servers(
        self, by_cluster: dict[str, list[Instance]], instances: tuple[Instance, ...]
    ) -> list[WorkerAddress]:
        """SGLang: a launcher a cluster. All start at once, which takes as long as the slowest."""
        asked = self._scenario.engine.sglang
        assert asked is not None, "the engine is SGLang"
        if not sglang.all_attached(self._deployment, asked):
            sglang.check_link(self._deployment, self._link)
        launchers = {
            cluster: self._start_launcher(cluster)
            for cluster, members in by_cluster.items()
            if members
        }
        patience_s = asked.ready_timeout_s + sglang.MARGIN_S
        ready = {
            cluster: self._children.wait_for(launcher, "ready", patience_s)
            for cluster, launcher in launchers.items()
        }
        servers = sglang.reach(instances, ready, asked, self._link)
        self.versions = {"sglang": servers.version} if servers.version else {}
        self.engine_notes = servers.notes
        self.addresses = {one.name: (one.host, one.port) for one in servers.workers}
        return list(servers.workers)

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
        bounds = self._receiver_bounds()
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
            decode_steps=scenario.serving.decode_steps,
            decode_memory_bytes=scenario.serving.decode_memory_bytes,
            transfer_deadline_wall_s=self._timeout_wall_s(),
            sample_period_wall_s=SAMPLE_PERIOD_WALL_S,
            max_connections=bounds["max_connections"],
            max_buffer_bytes=bounds["max_buffer_bytes"],
            secret_hex=self._secret_hex,
            api_key=self.worker_key,
            engines_spool=self._spool("engines"),
            link_spool=self._spool("link"),
            reference=scenario.engine.reference,
            context_tokens=reference.context_tokens(scenario),
        )
        name = f"worker-{cluster}"
        child = self._start(name, site, ["-m", "harness.engine"])
        child.tell(config)
        return child

    def _start_launcher(self, cluster: str) -> Child:
        site = self._link.far if cluster == PRFAAS else self._link.near
        folder = self._run.cell_path(self._cell)
        name = f"servers-{cluster}"
        # At no real-time priority: servers that compute would keep the machine from all others.
        child = self._children.start(
            name, site.popen, ["-m", "harness.engine.sglang"], self._log(name), EngineError
        )
        child.tell(
            sglang.launcher_config(
                self._scenario, self._deployment, cluster, site, folder, self.worker_key
            )
        )
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
        rank = 0
        is_worker = name.startswith("worker")
        # A worker that computes would keep the machine from all others.
        computes = is_worker and self._scenario.engine.reference is not None
        if self._scenario.testbed.realtime and sys.platform == "linux" and not computes:
            # Downstream first: what is nearest to the first token must not wait for new arrivals.
            rank = 2 if is_worker else 1
        return self._children.start(name, site.popen, arguments, self._log(name), EngineError, rank)

    def _start_gateway(self, workers: list[WorkerAddress]) -> Child:
        scenario, given = self._scenario, self._scenario.gateway
        config = GatewayConfig(
            host=self._link.near.address,
            port=scenario.testbed.gateway_port,
            model=scenario.model.name,
            workers=workers,
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
            **self._of_engine(),
        )
        child = self._start("gateway", self._link.near, ["-m", "harness.gateway"])
        child.tell(config)
        return child

    def _of_engine(self) -> dict[str, Any]:
        """What of the gateway's configuration only real servers have."""
        asked = self._scenario.engine.sglang
        if asked is None:
            return {}
        return {
            "engine": "sglang",
            "canary_timeout_wall_s": sglang.CANARY_TIMEOUT_S,
            "page_tokens": asked.page_size,
            # Of several ranks one counts, and only what it holds: the run's own gate knows it.
            "counts_kv": sglang.counts_kv(self.versions.get("sglang"))
            and all(one.tp == 1 for one in asked.roles.values()),
            "engines_spool": self._spool("engines"),
        }

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
        loading = Loading(
            self._scenario,
            self._run,
            self._cell,
            self._link,
            self._children,
            self._gateway,
            address or (self._link.near.address, self.gateway_port),
            self.gateway_key,
            self._web_fd,
        )
        result = loading.replay(salt, progress, started)
        if self._scenario.engine.sglang is not None:
            # The counters of its servers once more, after the last request.
            self._gateway.tell({"count": True})
            self._children.wait_for(self._gateway, "counted", READY_TIMEOUT_S)
        return result
