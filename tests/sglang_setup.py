"""A gateway's configuration before servers that speak SGLang's protocol."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from live import flat_profile, scenario
from sglang_wire import PAGE_TOKENS

from harness.core import Role
from harness.gateway.config import GatewayConfig, WorkerAddress
from harness.profile_file import ProfileSource
from harness.scheduling.config import policy_of

ROOT = Path(__file__).parents[1]
#: 512 bytes a token, so 32,768 a page.
DENSE = ROOT / "profiles/tiny/sglang-tiny-dense.json"


def addresses_of(ports: dict[str, int]) -> list[WorkerAddress]:
    """A prefill and a decode server on loopback, in one cluster."""
    roles: tuple[Role, ...] = ("prefill", "decode")
    return [
        WorkerAddress(f"pd-{role[0]}0", "pd", role, "h20", "127.0.0.1", ports[role])
        for role in roles
    ]


def config_of(root: Path, workers: list[WorkerAddress], **changes: Any) -> GatewayConfig:
    """A gateway before ``workers`` that serve the tiny dense model."""
    given = scenario("scheduling.bandwidth_aware=false", 'scheduling.admission="reserve_first"')
    profile = flat_profile(root / "flat.json", 0.05, 0.01, 4)
    policy = replace(
        policy_of(given, given.deployments["homogeneous_pd"]),
        instances=tuple(worker.instance() for worker in workers),
        decode_step_s=0.01,
        decode_max_batch=4,
    )
    config = GatewayConfig(
        host="127.0.0.1",
        port=0,
        model="m",
        workers=workers,
        profiles={"h20": ProfileSource(str(profile), None)},
        architecture=str(DENSE),
        kv_dtype="bf16",
        policy=policy,
        time_scale=1.0,
        byte_scale=1.0,
        request_timeout_wall_s=10.0,
        api_key=None,
        worker_key="key",
        gateway_spool=str(root / "gateway.jsonl"),
        decisions_spool=str(root / "decisions.jsonl"),
        link_spool=str(root / "link.jsonl"),
        timeouts=given.gateway.timeouts,
        max_retries=1,
        max_body_bytes=given.gateway.max_body_bytes,
        tokenizer=None,
        engine="sglang",
        canary_timeout_wall_s=5.0,
        page_tokens=PAGE_TOKENS,
        counts_kv=True,
        engines_spool=str(root / "engines.jsonl"),
    )
    return msgspec.structs.replace(config, **changes)
