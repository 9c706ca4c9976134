"""A hybrid-attention decoder in torch that computes real KV, small enough to be read.

``config`` says what a model is, ``weights`` and ``checkpoint`` what it holds, ``cache`` what a
request leaves on the device, ``model`` computes; ``engine`` puts it behind a worker's two ends. All
but ``config``, ``body``, ``choice`` and ``model_keys`` need torch, which the base install lacks:
call ``require_torch`` before importing them.
"""

from importlib.util import find_spec

from harness.core import EngineError


def require_torch() -> None:
    """EngineError where torch is not installed."""
    if find_spec("torch") is None:
        raise EngineError(
            "The reference engine computes with torch, which is not installed; "
            "pip install 'prfaas-bench[torch]' (for a machine without a GPU add "
            "--extra-index-url https://download.pytorch.org/whl/cpu)."
        )


def require_device(device: str, key: str) -> None:
    """EngineError without torch, or where it does not find the device that ``key`` asks for."""
    require_torch()
    import torch  # no part of the base install

    if device == "cuda" and not torch.cuda.is_available():
        raise EngineError(f'{key} is "cuda", and torch finds no GPU here; set it to "cpu".')
