"""A live instance: one of the two roles at a time, on one port, with one memory.

The end of a role is made when the instance first has it, and kept. Only a drained instance is
converted: what is under way ends where it began.
"""

from collections.abc import Awaitable, Callable, Mapping

from harness.core import EngineError, Role
from harness.engine.config import InstanceConfig
from harness.engine.decode_end import DecodeEnd
from harness.engine.memory import Memory
from harness.engine.prefill_end import PrefillEnd
from harness.transport.sender import KvSender

End = PrefillEnd | DecodeEnd
MakeEnd = Callable[["LiveInstance"], Awaitable[End]]


class BusyError(EngineError):
    """The instance has requests open."""


class LiveInstance:
    """``convertible`` false: it keeps its role. ``memory`` is None without a prefix cache."""

    def __init__(
        self,
        config: InstanceConfig,
        sender: KvSender,
        memory: Memory | None,
        make: Mapping[Role, MakeEnd],
        *,
        convertible: bool,
    ) -> None:
        self.name = config.name
        self.hardware = config.hardware
        self.role = config.role
        self.sender = sender
        self.memory = memory
        self._make = make
        self._convertible = convertible
        self._ends: dict[Role, End] = {}

    @property
    def end(self) -> End:
        """The end of the role that it has."""
        return self._ends[self.role]

    async def open(self) -> None:
        """Make the end of its first role."""
        self._ends[self.role] = await self._make[self.role](self)

    async def convert(self, role: Role) -> None:
        """Take a role. BusyError while a request is open here; what others pin of the memory may
        stay, since the memory does."""
        if role == self.role:
            return
        if not self._convertible:
            raise EngineError(
                f"{self.name} keeps its role; scheduling.role_conversion lets it be converted"
            )
        if role not in self._ends:
            self._ends[role] = await self._make[role](self)
        if self.end.open_requests:
            raise BusyError(f"{self.name} has requests open; drain it first")
        self.role = role
