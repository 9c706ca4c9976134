"""An SGLang general plugin: what disaggregation and hybrid layers need where torch has no CUDA.

SGLang loads it in every process. Each patch is of a place that SGLang 0.5.23 reaches without a GPU
though it was written for one; a function that is not there any more fails the plugin, and the
launcher reports that.
"""

from collections.abc import Callable
from typing import Any

import torch

from prfaas_sglang_cpu import delta_rule


def register() -> None:
    """Called by SGLang; does nothing where there is a GPU."""
    if torch.cuda.is_available():
        return
    _events()
    _host_tensors()
    _attention()
    _norms()
    _kimi_delta()
    _nixl()


class _Done:
    """An event or a stream where every kernel has ended when its call returns."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in ("record", "wait", "synchronize", "wait_event", "wait_stream"):
            raise AttributeError(name)
        return _do_nothing


def _do_nothing(*_: object, **__: object) -> None:
    pass


def _events() -> None:
    torch.cuda.Event = _Done  # type: ignore[assignment,misc]  # in its place
    torch.cuda.current_stream = _Done  # type: ignore[assignment]  # in its place


def _host_tensors() -> None:
    """Sending from tensors on the host would pin their memory, which takes a driver."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False


def _attention() -> None:
    """The only backend that runs without a GPU knows no attention sinks; MiMo passes none."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    def without_sinks(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: object, *args: object, sinks: object = None, **options: object) -> Any:
            if sinks is not None:
                raise NotImplementedError("torch_native has no attention sinks")
            return forward(self, *args, **options)

        return call

    for name in ("forward_extend", "forward_decode"):
        forward = getattr(TorchNativeAttnBackend, name)
        setattr(TorchNativeAttnBackend, name, without_sinks(forward))


def _norms() -> None:
    """The gated RMS norm after a linear-attention layer is a Triton kernel."""
    from sglang.kernels.ops.attention.fla import fused_norm_gate

    gates = {"sigmoid": torch.sigmoid, "swish": torch.nn.functional.silu}

    def gated_norm(
        x: torch.Tensor,
        g: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str = "swish",
        residual: torch.Tensor | None = None,
        eps: float = 1e-6,
        **_: object,
    ) -> torch.Tensor:
        assert bias is None, "no model here has one"
        assert residual is None, "no model here has one"
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
        out = x.float() * scale * weight.float() * gates[activation](g.float())
        return out.to(x.dtype)

    fused_norm_gate.rms_norm_gated = gated_norm


def _kimi_delta() -> None:
    """SGLang imports no kernels of these layers at all without a GPU."""
    from sglang.srt.layers.attention.linear import kda_backend
    from sglang.srt.layers.attention.linear.kernels import kda_triton

    kda_backend.causal_conv1d_fn = delta_rule.conv1d_prefill
    kda_triton.chunk_kda = delta_rule.kda_prefill
    kda_triton.fused_sigmoid_gating_delta_rule_update = delta_rule.kda_decode


def _nixl() -> None:
    """SGLang's connector calls all KV VRAM, which UCX refuses of memory of the host."""
    try:
        from nixl._api import nixl_agent
    except ImportError:  # the other transfer backend is in use
        return

    def of_host(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: object, *args: Any, **options: Any) -> Any:
            args = tuple(_host(one) for one in args)
            return method(self, *args, **{key: _host(one) for key, one in options.items()})

        return call

    for name in ("register_memory", "get_reg_descs", "get_xfer_descs", "prep_xfer_dlist"):
        setattr(nixl_agent, name, of_host(getattr(nixl_agent, name)))


def _host(argument: Any) -> Any:
    return "DRAM" if isinstance(argument, str) and argument == "VRAM" else argument
