"""What is profiled: one server, or a prefill and a decode server of a disaggregated pair.

T_prefill is seen twice. From outside it is the TTFT of a request for one token. From inside it is
what the engine says it computed for; ``parts`` is what the difference is made of, each part a
duration that one process measured:

    SGLang    queue (from received to the forward pass: tokeniser, scheduler), prefill, server
              (from its end to the answer: sampling, detokeniser), http (TTFT less these three)
    ours      request (until the worker has read it), queue, prefill (as planned), late (the
              worker's wake-up), answer (until the first token is read here)

The inside value is what a profile is for: HTTP and queueing are other terms of the TTFT budget.
Where an engine says nothing (OpenAI's surface) there is only the outside. All times are scenario
seconds, wall time multiplied by ``time_scale``, which is 1 but for emulated engines.
"""

import asyncio
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from harness.core import EngineError, ScenarioError
from harness.engine.sglang.capabilities import read_capabilities
from harness.engine.sglang.config import ServerRole
from harness.gateway.engine_watch import read_counted
from harness.gateway.sglang import prefill_times
from harness.profiler.probe import Answer, Probe, Tokens
from harness.profiler.prompts import Prompt
from harness.surface.generate import MetaInfo, PrefillSpan


@dataclass(frozen=True, slots=True)
class Info:
    """What an engine says of itself; None where it does not say. ``flags`` are all settings that
    do not change from start to start, none of them a secret; those of a pair's prefill server have
    ``prefill.`` before their names. ``has_cache`` is whether prefixes can be reused at all, ``tp``
    the attention ranks of a group, the most of a pair's two servers. Capacity and ``max_running``
    are of all data-parallel groups together."""

    engine: str
    version: str
    flags: Mapping[str, Any]
    limit_tokens: int | None
    capacity_tokens: int | None
    max_running: int | None
    page_tokens: int
    has_cache: bool
    model_path: str | None
    served_model: str | None = None
    tp: int = 1


@dataclass(frozen=True, slots=True)
class Prefilled:
    """One request for one token."""

    outside_s: float
    inside_s: float | None
    cached_tokens: int | None
    prompt_tokens: int | None
    sent_mono_ns: int
    parts: Mapping[str, float] = field(default_factory=dict)
    kv_wire_bytes: int | None = None
    #: Of the prompt's growing KV, what lay in the decode server's cluster and did not move.
    resident_tokens: int = 0
    layer_shares: tuple[float, ...] = ()


class Target(Protocol):
    """An engine under measurement."""

    time_scale: float
    byte_scale: float
    urls: tuple[str, ...]

    async def prefill(self, prompt: Prompt) -> Prefilled:
        """One request for one token."""

    async def decode(self, prompt: Prompt, output_tokens: int, tokens: Tokens) -> None:
        """A request whose tokens are told to ``tokens``; it ends with its output, or cancelled."""

    async def info(self) -> Info:
        """What the engine says of itself."""


class Single:
    """One server that prefills and decodes."""

    time_scale = 1.0
    byte_scale = 1.0

    def __init__(self, probe: Probe, engine: str) -> None:
        self._probe = probe
        self._engine = engine
        self.urls: tuple[str, ...] = (probe.url,)

    async def prefill(self, prompt: Prompt) -> Prefilled:
        answer = await self._probe.ask(prompt, 1)
        meta = answer.metas.get("")
        return _prefilled(answer, {} if meta is None else sglang_parts(meta, answer.ttft_wall_s))

    async def decode(self, prompt: Prompt, output_tokens: int, tokens: Tokens) -> None:
        await self._probe.ask(prompt, output_tokens, tokens=tokens)

    async def info(self) -> Info:
        return await _INFO[self._engine](self._probe)


class Pair:
    """A prefill and a decode server that are asked together, as SGLang's PD protocol has it."""

    def __init__(
        self,
        prefill: Probe,
        decode: Probe,
        bootstrap_port: int | None = None,
        time_scale: float = 1.0,
        byte_scale: float = 1.0,
        max_running: int | None = None,
    ) -> None:
        self._max_running = max_running
        self._prefill, self._decode = prefill, decode
        parts = urlsplit(prefill.url)
        self._host = parts.hostname or ""
        self._asked_port, self._port = bootstrap_port, bootstrap_port or parts.port or 80
        self.urls: tuple[str, ...] = (prefill.url, decode.url)
        self.time_scale, self.byte_scale = time_scale, byte_scale

    async def prefill(self, prompt: Prompt) -> Prefilled:
        first, second = await self._both(prompt, 1, Tokens())
        done = first.metas.get("transfer_done")
        if done is None or done.prfaas is None or done.prfaas.prefill is None:
            meta = first.metas.get("")
            return _prefilled(first, {} if meta is None else sglang_parts(meta, first.ttft_wall_s))
        finished = second.metas["finished"].prfaas
        if finished is None or finished.decode is None:
            raise EngineError("the decode worker did not say what KV it decoded from")
        return self._worker_prefilled(first, done.prfaas.prefill, finished.decode.resident_tokens)

    def _worker_prefilled(
        self, answer: Answer, span: PrefillSpan, resident_tokens: int
    ) -> Prefilled:
        """By the spans of our own workers, which share this host's clock."""
        parts_ns = {
            "request": span.received_mono_ns - answer.sent_mono_ns,
            "queue": span.start_mono_ns - span.received_mono_ns,
            "prefill": span.service_wall_s * 1e9,
            "late": span.late_s * 1e9,
            "answer": answer.tokens.mono_ns[0] - span.end_mono_ns,
        }
        finals_ns, service_ns = span.layer_final_mono_ns, span.service_wall_s * 1e9
        return Prefilled(
            answer.ttft_wall_s * self.time_scale,
            span.service_wall_s * self.time_scale,
            span.cached_tokens,
            answer.prompt_tokens,
            answer.sent_mono_ns,
            {name: ns / 1e9 * self.time_scale for name, ns in parts_ns.items()},
            span.kv_wire_bytes_sent,
            resident_tokens,
            tuple((final - span.start_mono_ns) / service_ns for final in finals_ns),
        )

    async def decode(self, prompt: Prompt, output_tokens: int, tokens: Tokens) -> None:
        await self._both(prompt, output_tokens, tokens)

    async def _both(
        self, prompt: Prompt, output_tokens: int, tokens: Tokens
    ) -> tuple[Answer, Answer]:
        bootstrap = {
            "bootstrap_host": self._host,
            "bootstrap_port": self._port,
            "bootstrap_room": secrets.randbits(60),
        }
        try:
            async with asyncio.TaskGroup() as both:
                first = both.create_task(self._prefill.ask(prompt, output_tokens, bootstrap))
                second = both.create_task(
                    self._decode.ask(prompt, output_tokens, bootstrap, tokens)
                )
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        return first.result(), second.result()

    async def info(self) -> Info:
        """Of both: prompts have to fit into either, prefixes and pages are the prefill server's,
        slots and memory the decode server's. From then on requests name the bootstrap port that the
        prefill server told, unless one was given; our own workers tell none and have it at their
        HTTP port."""
        said = await _sglang_said(self._prefill, "prefill")
        self._port = self._asked_port or read_capabilities(said).bootstrap_port or self._port
        first = await _read_info(self._prefill, said)
        second = await _read_info(self._decode, await _sglang_said(self._decode, "decode"))
        limits = [one for one in (first.limit_tokens, second.limit_tokens) if one is not None]
        return Info(
            engine=second.engine,
            version=second.version,
            flags={f"prefill.{key}": value for key, value in first.flags.items()}
            | dict(second.flags),
            limit_tokens=min(limits, default=None),
            capacity_tokens=second.capacity_tokens,
            max_running=self._max_running or second.max_running,
            page_tokens=first.page_tokens,
            has_cache=first.has_cache,
            model_path=second.model_path,
            tp=max(first.tp, second.tp),
        )

    async def kv_counter_bytes(self) -> int | None:
        """What SGLang says it has transferred so far; None where it does not count."""
        text = await self._prefill.text("/metrics")
        return None if text is None else read_counted(text.encode()).kv_sent_bytes


def _prefilled(answer: Answer, parts: Mapping[str, float]) -> Prefilled:
    return Prefilled(
        answer.ttft_wall_s,
        parts.get("prefill"),
        answer.cached_tokens,
        answer.prompt_tokens,
        answer.sent_mono_ns,
        parts,
    )


def sglang_parts(meta: MetaInfo, outside_s: float) -> dict[str, float]:
    """What a TTFT is made of by SGLang's own clock; empty where it does not say when it began and
    ended to compute (``--enable-metrics``). The parts add up to ``outside_s``."""
    times = prefill_times(meta, [])
    if times.prefill_s is None or times.queue_s is None or times.transfer_s is None:
        return {}
    parts = {"queue": times.queue_s, "prefill": times.prefill_s, "server": times.transfer_s}
    return parts | {"http": outside_s - sum(parts.values())}


#: Settings that are in no profile, nor is any other that repeats the value of one.
_SECRETS = ("api_key", "admin_api_key", "ssl_keyfile_password")
#: Of a server's settings: what differs from start to start, or grows while it runs, or repeats
#: other settings with the secrets among them.
_VOLATILE = (
    "launch_command",
    "startup_time",
    "disaggregation_bootstrap_port",
    "internal_states",
    "random_seed",
    "port",
    "nccl_port",
    "host",
    "dist_init_addr",
    "status",
    "instance",
    *_SECRETS,
)


async def _sglang_said(probe: Probe, role: ServerRole) -> dict[str, Any]:
    """What a server says of its settings. ScenarioError where it says that its role is another."""
    said = await probe.get("/get_server_info") or await probe.get("/server_info")
    if not isinstance(said, dict):
        raise EngineError(
            f"{probe.url} has no /get_server_info: it is no SGLang server; try --kind openai"
        )
    fault = read_capabilities(said).fault(role, None, None)
    if fault is not None and "disaggregation_mode" in said:
        raise ScenarioError(
            f"{probe.url} {fault}: give a server that does both as --url, the two of a pair as "
            "--prefill-url and --decode-url."
        )
    return said


def _flags(said: Mapping[str, Any]) -> dict[str, Any]:
    hidden = [value for key in _SECRETS if (value := said.get(key)) and isinstance(value, str)]
    return {
        key: value
        for key, value in said.items()
        if key not in _VOLATILE
        and isinstance(value, str | int | float | bool | None)
        and not any(secret in str(value) for secret in hidden)
    }


def _slots(said: Mapping[str, Any], groups: int) -> int | None:
    """How many requests run at once; as resolved, each group says it of itself."""
    states = said.get("internal_states")
    inner = states[0] if isinstance(states, list) and states else None
    each = inner.get("effective_max_running_requests_per_dp") if isinstance(inner, dict) else None
    return each * groups if each else said.get("max_running_requests")


async def _read_info(probe: Probe, said: Mapping[str, Any]) -> Info:
    model = await probe.get("/get_model_info") or await probe.get("/model_info") or {}
    path = said.get("model_path") or model.get("model_path")
    cache = said.get("prefix_cache")
    is_ours = said.get("engine") in ("emulated", "reference")
    told = read_capabilities(said)
    pages = cache["checkpoint_tokens"] if is_ours and cache else told.page_size
    limit = said.get("context_length") or said.get("max_req_input_len") or said.get("max_model_len")
    return Info(
        engine=str(said.get("engine") or "sglang"),
        version=str(said.get("version") or "unknown"),
        flags=_flags(said),
        limit_tokens=limit,
        capacity_tokens=None if told.max_total_tokens is None else told.max_total_tokens * told.dp,
        max_running=_slots(said, told.dp),
        page_tokens=int(pages or 1),
        has_cache=bool(cache) if is_ours else not said.get("disable_radix_cache", False),
        model_path=None if path is None else str(path),
        tp=max(1, told.tp // told.dp),
    )


async def _sglang_info(probe: Probe) -> Info:
    return await _read_info(probe, await _sglang_said(probe, "both"))


async def _openai_info(probe: Probe) -> Info:
    said = await probe.get("/v1/models")
    try:
        model = said["data"][0]
        name = str(model["id"])
    except (TypeError, KeyError, IndexError) as error:
        raise EngineError(f"{probe.url} has no /v1/models with a model to ask for") from error
    probe.more.setdefault("model", name)
    version = await probe.get("/version")
    told = version.get("version") if isinstance(version, dict) else None
    return Info(
        engine=str(model.get("owned_by") or "openai-compatible"),
        version=str(told or "unknown"),
        flags={},
        limit_tokens=model.get("max_model_len"),
        capacity_tokens=None,
        max_running=None,
        page_tokens=1,
        has_cache=True,
        model_path=model.get("root"),
        served_model=name,
    )


_INFO = {"sglang": _sglang_info, "openai": _openai_info}
