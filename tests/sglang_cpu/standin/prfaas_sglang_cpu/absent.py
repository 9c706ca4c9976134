"""Packages that SGLang imports at the top of modules and that a text model without a GPU never
calls: torchvision, whose wheels drag in CUDA, and triton, which is large.

Any name of them can be imported. A class of theirs can be derived from, a decorator gives back what
it decorates; everything else would fail where it is used.
"""

import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from typing import Any

ABSENT = ("torchvision", "triton")


class _Names(type):
    """A class whose attributes are their own names, as an enumeration is written."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class _Module(types.ModuleType):
    __path__: Sequence[str] = ()
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            made: Any = _Names(name, (), {"__module__": self.__name__, "__init__": _accept})
        else:
            made = importlib.import_module(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made

    def __call__(self, *args: Any, **options: Any) -> Any:
        """As a decorator, with or without arguments."""
        if len(args) == 1 and callable(args[0]) and not options:
            return args[0]
        return _same


def _accept(*_: object, **__: object) -> None:
    """Whatever a class is made with."""


def _same(decorated: Callable[..., Any]) -> Callable[..., Any]:
    return decorated


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, _path: object = None, _target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing in it."""


def stand_in() -> None:
    """Last of the finders, so that a package that is installed wins."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
