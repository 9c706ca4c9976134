"""What goes wrong at a worker, and what it says of it: by a status, or in its stream."""

import msgspec

from harness.core import EngineError

#: Of an error's body, for a message.
_EXCERPT_BYTES = 300


class InstanceLostError(EngineError):
    """An instance went away with a request: what it was doing is not being done any more."""

    def __init__(self, instance: str, reason: str) -> None:
        super().__init__(reason)
        self.instance = instance


class InstanceUnreachableError(InstanceLostError):
    """Nothing answers at an instance's address; ``in_time`` is false where that took so long that
    the way there may be to blame."""

    def __init__(self, instance: str, reason: str, *, in_time: bool = True) -> None:
        super().__init__(instance, f"{instance} is not reachable: {reason}")
        self.in_time = in_time


class TransferFailedError(InstanceLostError):
    """The KV did not get from one instance to the other: no token has been generated from it."""


class AnsweredError(EngineError):
    """An instance answered with another status than 200."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Failure(msgspec.Struct):
    """The part of an error's answer that says what failed, and in which phase."""

    message: str = ""
    code: str | int | None = None


class _Failed(msgspec.Struct):
    error: Failure | str


def failure(instance: str, said: Failure | str, status: int | None = None) -> EngineError:
    """What an instance says went wrong, in its stream or by a status."""
    how = "failed" if status is None else f"answered {status}"
    if isinstance(said, Failure) and said.code == "transfer":
        return TransferFailedError(instance, f"{instance} {how}: {said.message}")
    message = f"{instance} {how}: {said if isinstance(said, str) else said.message}"
    return EngineError(message) if status is None else AnsweredError(status, message)


def said_of(body: bytes) -> Failure | str:
    """What an error's body says, be it of the protocol or not."""
    try:
        return msgspec.json.decode(body, type=_Failed).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body[:_EXCERPT_BYTES].decode(errors="replace")
