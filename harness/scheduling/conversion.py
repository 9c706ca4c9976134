"""One change of role at a time: drain an instance, have it converted, put it back in service.

    asked for      the instance with least to do gets no new requests
    empty          the driver is told (``Convert``), and the instance is out of service
    ``Converted``  it serves in its new role
    ``InstanceDown`` at any time ends it; the instance keeps the role it had
    another one is lost, and it is the last of its role: while it drains it is kept

A prefill instance is empty when the KV of all its requests has landed, not when their prefill ends.
"""

from dataclasses import dataclass

from harness.core import Role
from harness.scheduling import events as ev
from harness.scheduling.backlog import DecodeBacklog, PrefillBacklog
from harness.scheduling.fleet import Fleet


@dataclass(slots=True)
class _Change:
    backlog: PrefillBacklog | DecodeBacklog
    role: Role
    told: bool = False


class Conversion:
    """The change of role that is under way, if any."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._change: _Change | None = None
        #: Whether there is one; looked at after every event.
        self.under_way = False

    @property
    def instance(self) -> str | None:
        """What drains or is being converted."""
        return None if self._change is None else self._change.backlog.instance.name

    def drain(self, role: Role, now_s: float) -> bool:
        """Begin; False when no instance can be spared for ``role``."""
        assert self._change is None, f"{self.instance} is still changing its role"
        chosen = self._fleet.spare(role, now_s)
        if chosen is None:
            return False
        chosen.draining = True
        self._fleet.changed(chosen)
        self._change = _Change(chosen, role)
        self.under_way = True
        return True

    def when_empty(self) -> list[ev.Action]:
        """What to tell the driver, once, after any event."""
        change = self._change
        if change is None or change.told or not change.backlog.is_empty:
            return []
        change.told = True
        change.backlog.up = False
        return [ev.Convert(change.backlog.instance.name, change.role)]

    def done(self, instance: str) -> bool:
        """The instance has its new role; False where it was given up as lost meanwhile, be it that
        it drains again."""
        change = self._change
        if change is None or self.instance != instance or not change.told:
            return False
        self._change = None
        self.under_way = False
        self._fleet.convert(change.backlog, change.role)
        return True

    def keep_last(self) -> bool:
        """Call it off if nobody else is left in the role of what drains; True if so."""
        change = self._change
        if change is None or change.told or self._fleet.has_fellow(change.backlog):
            return False
        change.backlog.draining = False
        self._fleet.changed(change.backlog)
        self._change = None
        self.under_way = False
        return True

    def give_up(self, instance: str) -> bool:
        """The instance is lost; True if it was to change its role."""
        if self._change is None or self.instance != instance:
            return False
        self._change.backlog.draining = False
        self._change = None
        self.under_way = False
        return True
