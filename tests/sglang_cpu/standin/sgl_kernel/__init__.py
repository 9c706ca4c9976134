"""In place of SGLang's compiled kernels, whose wheels are for CUDA: names import, calls raise."""

from typing import Any

__version__ = "0.4.10"


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return missing(name)


def missing(name: str) -> Any:
    """A function of that name that says that it is not there."""

    def call(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} runs on a GPU only")

    call.__name__ = name
    return call
