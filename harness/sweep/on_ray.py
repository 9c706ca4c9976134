"""Cells as tasks of a Ray cluster that is there already (extra ``ray``).

Each node has the project installed; one whose code is not this process' is refused, at the start
or when it joins later, since its numbers would be those of another program. A task that its node or
its process took with it is handed in again, until it was lost ``MAX_LOSSES`` times; one whose cell
raises ends there. As many tasks run as the cluster has cores, and as many more wait at its door.

Ray's own retries are off: they would not be counted, and those after a lack of memory never end.
"""

import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from harness.core import EngineError, ScenarioError
from harness.sweep.cells import Cell
from harness.sweep.code import describe_code, differences
from harness.sweep.execution import Outcome, failed
from harness.sweep.local import Pool

#: How often a cell is tried whose worker or node dies.
MAX_LOSSES = 5
_POLL_S = 1.0
_KNOCK_S = 10.0
_ANSWER_S = 60.0
#: A cluster without a core for so long gets none any more.
_MAX_IDLE_S = 60.0


def check_installed() -> None:
    """ScenarioError without the extra, before anything is made for a sweep."""
    try:
        import ray  # noqa: F401  # only whether it is there
    except ImportError as error:
        raise ScenarioError(
            "--ray needs the package ray, which is not installed: pip install 'prfaas-bench[ray]'."
        ) from error


@contextmanager
def ray_pool(address: str) -> Iterator[Pool]:
    """Connected to the cluster at ``address``: "auto", host:port or ray://host:port.

    EngineError where no cluster answers, or where its code is another.
    """
    check_installed()
    import ray

    with _connected(ray, address):
        _check_nodes(ray)
        yield lambda cells: _Run(ray, cells).outcomes()


@contextmanager
def _connected(ray: Any, address: str) -> Iterator[None]:
    """Ray takes SIGTERM for itself, which ends a sweep as Ctrl-C does."""
    ours = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise EngineError(
            f"No Ray cluster answers at {address!r}: {first}. Start one by `ray start --head`, on "
            "every further node `ray start --address=HOST:6379`, and name it by --ray HOST:6379."
        ) from error
    try:
        if ours:
            signal.signal(signal.SIGTERM, handler)
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """OSError or ValueError where nobody listens, for which Ray itself takes six minutes."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("it is not host:port")
    with socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S):
        pass


def _code_task() -> Callable[[], dict[str, str]]:
    """A function that travels by value, and so also to where the project is not installed."""

    def code() -> dict[str, str]:
        try:
            from harness.sweep.code import describe_code
        except ImportError as error:
            return {"prfaas-bench": f"not installed ({error})"}
        return describe_code()

    return code


def _cell_task() -> Callable[[Cell, dict[str, str]], Outcome | str]:
    """By value too; says what differs where the code is not the sweep's."""

    def cell(one: Cell, expected: dict[str, str]) -> Outcome | str:
        from harness.sweep.code import describe_code, differences
        from harness.sweep.execution import run_cell

        return differences(expected, describe_code()) or run_cell(one)

    return cell


def _check_nodes(ray: Any) -> None:
    """Every node that is there runs this code."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task = ray.remote(num_cpus=0, max_retries=0)(_code_task())
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
    asked = {
        task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote(): node
        for node_id, node in nodes.items()
    }
    for answer, node in asked.items():
        try:
            there = ray.get(answer, timeout=_ANSWER_S)
        except ray.exceptions.RayError:
            continue  # it has just left, or is slow; whoever takes a cell is asked with it
        if different := differences(describe_code(), there):
            raise _other_code(node["NodeManagerAddress"], different)


def _other_code(node: str, different: str) -> EngineError:
    return EngineError(
        f"The Ray node {node} runs other code than this process, and its numbers would not be "
        f"comparable: {different}. Install the same version on every node."
    )


class _Run:
    """The cells of one sweep on their way through the cluster."""

    def __init__(self, ray: Any, cells: Iterable[Cell]) -> None:
        self._ray = ray
        self._cells = iter(cells)
        self._again: deque[Cell] = deque()
        self._losses: dict[str, int] = {}
        self._under_way: dict[Any, Cell] = {}  # by Ray's reference
        self._task = ray.remote(num_cpus=1, max_retries=0)(_cell_task())
        self._code = describe_code()
        self._idle_since_s: float | None = None

    def outcomes(self) -> Iterator[Outcome]:
        """As they come; tasks are handed in while there are cells and room for them."""
        while True:
            self._hand_in()
            if not self._under_way:
                return
            ended, _ = self._ray.wait(list(self._under_way), num_returns=1, timeout=_POLL_S)
            for reference in ended:
                if (outcome := self._outcome(reference)) is not None:
                    yield outcome

    def _hand_in(self) -> None:
        cores = self._cores()
        while len(self._under_way) < max(2, 2 * cores):
            cell = self._again.popleft() if self._again else next(self._cells, None)
            if cell is None:
                return
            self._under_way[self._task.remote(cell, self._code)] = cell

    def _cores(self) -> int:
        """Cores of the nodes that are alive. EngineError where there have been none for long."""
        cores = int(self._ray.cluster_resources().get("CPU", 0))
        now_s = time.monotonic()
        if cores:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = now_s
        elif now_s - self._idle_since_s > _MAX_IDLE_S:
            raise EngineError(
                f"The Ray cluster has had no core for {_MAX_IDLE_S:g} s. The cells that had ended "
                "are kept; resume once nodes are back."
            )
        return cores

    def _outcome(self, reference: Any) -> Outcome | None:
        """None where the cell is handed in again."""
        cell = self._under_way.pop(reference)
        try:
            found: Outcome | str = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ImportError):
                raise _other_code("that ran the last cell", str(error.cause)) from error
            return failed(cell.cell_id, error.cause or error)
        except self._ray.exceptions.RayError as error:
            return self._lost(cell, error)
        if isinstance(found, str):
            raise _other_code("that ran the last cell", found)
        return found

    def _lost(self, cell: Cell, error: Exception) -> Outcome | None:
        losses = self._losses[cell.cell_id] = self._losses.get(cell.cell_id, 0) + 1
        if losses < MAX_LOSSES:
            self._again.append(cell)
            return None
        first = (str(error).splitlines() or [""])[0]
        reason = f"its worker died {losses} times, last: {type(error).__name__}: {first}"
        return Outcome(cell.cell_id, "lost", reason, {})
