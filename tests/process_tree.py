"""The processes below one, and which of them still run."""

from pathlib import Path


def children_of(pid: int) -> dict[int, str]:
    """Processes below ``pid`` by command line."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            parents[int(entry.name)] = int(fields[1])
            commands[int(entry.name)] = command
    found = {child: commands[child] for child, parent in parents.items() if parent == pid}
    for child in list(found):
        found |= children_of(child)
    return found


def alive(pids: dict[int, str]) -> list[str]:
    """Which of these processes still run the command they ran."""
    found = []
    for pid, command in pids.items():
        try:
            now = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if now == command:
            found.append(command)
    return found
