"""The servers of one cluster: launched side by side, waited for, watched, stopped together."""

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import aiohttp

from harness.core import EngineError
from harness.engine.sglang.capabilities import Capabilities, read_capabilities
from harness.engine.sglang.command import gpus_of
from harness.engine.sglang.config import AttachedConfig, LauncherConfig
from harness.engine.sglang.health import Speaker, watch_health
from harness.engine.sglang.metrics import read_counters
from harness.engine.sglang.ports import choose_ports
from harness.engine.sglang.probe import (
    ask_interpreter,
    check_gpus,
    check_interpreter,
    find_interpreter,
)
from harness.engine.sglang.server import Server, launch
from harness.engine.sglang.versions import known_version, unsupported

#: For one server to say what it has counted, before it is stopped.
LAST_WORDS_S = 1.0


class Launcher:
    """``open`` it, and ``close`` it: the servers run in between. Each failure is an EngineError
    that names the server and the phase."""

    def __init__(self, config: LauncherConfig) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self._servers: list[Server] = []
        self._speakers: dict[str, Speaker] = {}
        self._capabilities: dict[str, Capabilities] = {}
        self.version = ""

    async def open(self) -> Self:
        """Launch, or find, the servers and wait until all are ready; nothing is left of a failed
        or cancelled attempt."""
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            if self._config.servers:
                await self._launch(session, stack)
            for one in self._config.attached:
                self._speakers[one.name] = Speaker(session, one.url, self._config.api_key)
            await self._until_ready()
            await self._look()
            self._stack = stack.pop_all()
        return self

    async def close(self) -> None:
        """Launched servers are gone afterwards."""
        await self._stack.aclose()

    async def _launch(self, session: aiohttp.ClientSession, stack: AsyncExitStack) -> None:
        config = self._config
        _check_model_path(config)
        on_gpus = config.device == "cuda"
        probe = await asyncio.to_thread(ask_interpreter, config.python, on_gpus)
        pairs = any(one.role != "both" for one in config.servers)
        backend = config.transfer_backend if pairs else None
        self.version = check_interpreter(probe, config.python, config.version, backend)
        if on_gpus:
            check_gpus(
                probe,
                max(s.base_gpu + gpus_of(s.tp, s.dp, s.extra_flags) for s in config.servers),
            )
        if reason := unsupported(self.version, config.requires):
            raise EngineError(f"SGLang cannot run in phase launch: {reason}.")
        version, _ = known_version(self.version)
        if not on_gpus and not version.cpu_pages and config.page_size not in (None, 1):
            raise EngineError(
                f"SGLang cannot run in phase launch: without a GPU the pages of SGLang "
                f"{self.version} have one token; set engine.page_size = 1."
            )
        choose_ports(config.address, config.servers, os.getpid())
        python = find_interpreter(config.python)
        await asyncio.to_thread(Path(config.log_directory).mkdir, parents=True, exist_ok=True)
        # Stopped side by side: one after another they would outlast the testbed's patience.
        stack.push_async_callback(self._stop_servers)
        for asked in config.servers:
            server = await launch(config, asked, version, python)
            self._servers.append(server)
            self._speakers[server.name] = Speaker(session, server.url, config.api_key)

    async def _stop_servers(self) -> None:
        await asyncio.gather(*(server.stop() for server in self._servers))

    async def _until_ready(self) -> None:
        """Wait for all of them; the first that ends, or is late, fails."""
        clock = asyncio.get_running_loop().time
        deadline_s = clock() + self._config.ready_timeout_s
        pending = {
            asyncio.ensure_future(speaker.get_ready()): name
            for name, speaker in self._speakers.items()
        }
        ends = [asyncio.ensure_future(server.ended()) for server in self._servers]
        try:
            while pending:
                done, _ = await asyncio.wait(
                    (*pending, *ends),
                    timeout=max(0.0, deadline_s - clock()),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if ended := next((one for one in ends if one in done), None):
                    raise ended.result()
                if not done:
                    raise self._late(next(iter(pending.values())))
                pending = {wait: name for wait, name in pending.items() if wait not in done}
        finally:
            await _cancel([*pending, *ends])
        for server in self._servers:
            server.was_ready = True

    def _late(self, name: str) -> EngineError:
        words = f"was not ready within {self._config.ready_timeout_s:g} s"
        for server in self._servers:
            if server.name == name:
                return server.error(words)
        url = self._speakers[name].url
        return EngineError(
            f"SGLang server {name} failed in phase ready: {url} {words}, by its /health; see that "
            "it runs, and is reached from here"
        )

    async def _look(self) -> None:
        """What every server is; EngineError where it is not what was asked for."""
        config = self._config
        roles = {one.name: one.role for one in config.servers}
        roles |= {one.name: one.role for one in config.attached}
        for name, speaker in self._speakers.items():
            found = read_capabilities(await speaker.server_info())
            fault = found.fault(roles[name], config.version, config.page_size)
            if fault is None and (reason := unsupported(found.version, config.requires)):
                fault = reason
            if fault is not None:
                raise EngineError(f"SGLang server {name} at {speaker.url} {fault}.")
            self._capabilities[name] = found
        versions = {one.version for one in self._capabilities.values()}
        if len(versions) > 1:
            raise EngineError(
                f"the servers of cluster {config.cluster} have different versions of SGLang "
                f"({', '.join(sorted(versions))}), which do not exchange KV; run one of them"
            )
        self.version = next(iter(versions))

    def told(self) -> dict[str, Any]:
        """The fields of the ``ready`` event."""
        attached = self._config.attached
        version, untested = known_version(self.version)
        return {
            "ports": {s.name: s.port for s in self._servers},
            "pids": {s.name: s.pid for s in self._servers},
            "bootstrap_ports": {
                s.name: s.bootstrap_port for s in self._servers if s.bootstrap_port
            },
            "addresses": {s.name: [self._config.address, s.port] for s in self._servers}
            | {one.name: _address(one) for one in attached},
            "version": self.version,
            "untested": untested,
            "lacks": version.lacks if untested is None else {},
            "server_info": {name: one.told() for name, one in self._capabilities.items()},
            "logs": {s.name: s.log_path for s in self._servers},
            "warnings": [f"{s.name}: {line}" for s in self._servers for line in s.warnings],
        }

    async def record_servers(self) -> None:
        """Write what ``ready`` says to ``servers-CLUSTER.json``, beside the logs."""
        path = Path(self._config.log_directory) / f"servers-{self._config.cluster}.json"
        text = json.dumps(self.told(), indent=1)
        await asyncio.to_thread(path.parent.mkdir, parents=True, exist_ok=True)
        await asyncio.to_thread(path.write_text, text)

    async def record_counters(self) -> None:
        """Write what each server has counted beside its log; one that is gone has no such file."""
        # Side by side: servers that hang must not hold up what ends the others.
        await asyncio.gather(*(self._record(name) for name in self._speakers))

    async def _record(self, name: str) -> None:
        path = Path(self._config.log_directory) / f"{name}.counters.json"
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
            async with asyncio.timeout(LAST_WORDS_S):
                counters = read_counters(await self._speakers[name].metrics())
            text = json.dumps(counters.told(), indent=1)
            await asyncio.to_thread(path.write_text, text)

    async def first_failure(self) -> EngineError:
        """Wait until a server has died, or has not been well for long."""
        config = self._config
        health = {
            name: watch_health(speaker, config.health_period_s, config.unhealthy_s)
            for name, speaker in self._speakers.items()
        }
        waits: list[Awaitable[EngineError]] = [server.ended() for server in self._servers]
        waits += [self._unwell(name, watching) for name, watching in health.items()]
        tasks = [asyncio.ensure_future(one) for one in waits]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(task for task in tasks if task.done()).result()
        finally:
            await _cancel(tasks)

    async def _unwell(self, name: str, watching: Awaitable[None]) -> EngineError:
        await watching
        return EngineError(
            f"SGLang server {name} failed in phase died: it runs, but {self._speakers[name].url} "
            f"has not answered /health for {self._config.unhealthy_s:g} s"
        )


async def _cancel(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _check_model_path(config: LauncherConfig) -> None:
    path = Path(config.model_path or "")
    if config.model_path is None or not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "is not there"
        raise EngineError(
            f"SGLang cannot run in phase load: the model {config.model_path} {what}; name the "
            "folder of the weights in engine.model_path"
        )


def _address(one: AttachedConfig) -> list[str | int]:
    url = urlsplit(one.url)
    return [url.hostname or "", url.port or 80]
