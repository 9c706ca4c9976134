"""What a running SGLang server is, by its ``/server_info``: settings as resolved, pools, version.

The answer has some 500 keys, its bearer token among them; what is told further is listed here.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.engine.sglang.config import ServerRole

#: By ``disaggregation_mode``.
_ROLES: dict[str, ServerRole] = {"null": "both", "prefill": "prefill", "decode": "decode"}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """None for what the version does not say. ``max_total_tokens`` is what the KV pool holds,
    of one data-parallel rank; ``mamba_slots`` how many recurrent states."""

    version: str
    role: ServerRole
    model_path: str
    model_name: str | None
    device: str | None
    tp: int
    dp: int
    ep: int
    pp: int
    page_size: int | None
    max_total_tokens: int | None
    chunked_prefill_tokens: int | None
    context_tokens: int | None
    max_running_requests: int | None
    kv_dtype: str | None
    attention_backend: str | None
    transfer_backend: str | None
    bootstrap_port: int | None
    radix_cache: bool
    overlap_schedule: bool
    speculative: str | None
    mamba_slots: int | None
    mamba_strategy: str | None
    mamba_state_dtype: str | None
    load_format: str | None
    quantization: str | None

    def told(self) -> dict[str, Any]:
        """For the ``ready`` event and the manifest."""
        return asdict(self)

    def fault(self, role: ServerRole, version: str | None, page_size: int | None) -> str | None:
        """What of it is not as asked for; the end of a sentence. None asks for nothing."""
        if self.role != role:
            is_one = "serves whole requests" if self.role == "both" else f"is of {self.role}"
            return f"{is_one} (disaggregation_mode), but {role} is asked for"
        if version is not None and self.version != version:
            return f"is version {self.version}, but engine.version asks for {version}"
        if page_size is not None and self.page_size not in (None, page_size):
            return (
                f"has pages of {self.page_size} tokens, but engine.page_size asks for {page_size}: "
                "its attention backend has pages of its own; set that size"
            )
        return None


def read_capabilities(info: Mapping[str, Any]) -> Capabilities:
    """``info`` is the answer of ``/server_info``; keys that a version lacks give None."""
    states = info.get("internal_states")
    inner = states[0] if isinstance(states, list) and states else {}

    def either(key: str) -> Any:  # of JSON
        """The resolved value, where the version tells it apart from the one given."""
        value = inner.get(key) if isinstance(inner, Mapping) else None
        return info.get(key) if value is None else value

    def number(key: str) -> int | None:
        value = either(key)
        return int(value) if isinstance(value, int | float) else None

    def text(key: str) -> str | None:
        value = either(key)
        return None if value is None else str(value)

    mode = str(info.get("disaggregation_mode") or "null")
    speculative = text("speculative_algorithm")
    return Capabilities(
        version=str(info.get("version") or "unknown"),
        role=_ROLES.get(mode, "both"),
        model_path=str(info.get("model_path")),
        model_name=text("served_model_name"),
        device=text("device"),
        tp=number("tp_size") or 1,
        dp=number("dp_size") or 1,
        ep=number("ep_size") or 1,
        pp=number("pp_size") or 1,
        page_size=number("page_size"),
        max_total_tokens=number("max_total_num_tokens"),
        chunked_prefill_tokens=number("chunked_prefill_size"),
        context_tokens=number("context_length"),
        max_running_requests=number("effective_max_running_requests_per_dp")
        or number("max_running_requests"),
        kv_dtype=text("kv_cache_dtype"),
        attention_backend=text("attention_backend"),
        transfer_backend=None if mode == "null" else text("disaggregation_transfer_backend"),
        bootstrap_port=number("disaggregation_bootstrap_port") if mode == "prefill" else None,
        radix_cache=not info.get("disable_radix_cache", False),
        overlap_schedule=not either("disable_overlap_schedule"),
        speculative=speculative if speculative not in ("None", "") else None,
        mamba_slots=number("max_mamba_cache_size"),
        mamba_strategy=text("mamba_radix_cache_strategy") or text("mamba_scheduler_strategy"),
        mamba_state_dtype=text("mamba_ssm_dtype"),
        load_format=text("load_format"),
        quantization=text("quantization"),
    )
