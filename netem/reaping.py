"""Taking links down, and removing what is left of those whose owner died.

What a dead owner can leave: processes that were started in its sites and run on without a network,
an interface that its dead-man could not give back, and its files. An entry whose owner lives is
left alone, unless the owner is a keeper and its link is taken down by name.
"""

from dataclasses import dataclass, replace

from netem.link import LinkError
from netem.restoration import NicRecord, restore
from netem.state import Entry, FolderError, entries, forget, locked, marked_processes


@dataclass(frozen=True, slots=True)
class Removed:
    """What was done for one entry, and what could not be, in words."""

    name: str
    ended_processes: tuple[int, ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        ended = f", ended processes {list(self.ended_processes)}" if self.ended_processes else ""
        problems = f"; not in order: {'; '.join(self.problems)}" if self.problems else ""
        return f"removed {self.name}{ended}{problems}"


def take_down(entry: Entry, *, forgetting: bool = False) -> Removed:
    """End a link and all that is left of it. LinkError when it is not one to be taken down.

    ``forgetting``: its record goes also when something could not be undone.
    """
    if entry.owner.is_alive():
        if not entry.details.get("keeper"):
            raise LinkError(
                f"the link {entry.name!r} belongs to the run of process {entry.owner.pid}, which "
                "is alive: end that, and the link goes with it"
            )
        entry.owner.end()
    with locked():
        # Read again: an owner that ended in order has nothing left, one that was starting up may
        # have written down since what it was about to change.
        left = [each for each in entries() if each.link_id == entry.link_id]
        return _remove(left[0] if left else replace(entry, details={}), forgetting)


def reap_stale() -> tuple[Removed, ...]:
    """Remove what is left of every entry whose owner is dead."""
    try:
        if all(entry.owner.is_alive() for entry in entries()):
            return ()
    except FolderError:
        return ()
    with locked():
        return tuple(_remove(entry) for entry in entries() if not entry.owner.is_alive())


def _remove(entry: Entry, forgetting: bool = False) -> Removed:
    """The entry stays when something is left that another call may be able to remove."""
    problems: list[str] = []
    ended = [process.pid for process in marked_processes(entry.link_id) if process.end()]
    if "nic" in entry.details:
        try:
            problems += restore(NicRecord.load(entry.details["nic"]))
        except (OSError, LinkError) as error:
            problems.append(str(error))
    if forgetting or not problems:
        forget(entry)
    return Removed(entry.name, tuple(ended), tuple(problems))
