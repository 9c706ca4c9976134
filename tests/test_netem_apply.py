"""A change of a running link that another thread changes too: one after the other, none mixed."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from netem.link import LinkSpec, symmetric
from netem.relayed import RelayPath
from netem.site import Site
from netem.tunnelled import ForwarderPath


class Slow:
    """A helper process whose first answer waits until a second request came, or for a while."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.first, self.second = threading.Event(), threading.Event()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.asked.append(request)
        if len(self.asked) == 1:
            self.first.set()
            self.second.wait(0.3)
        else:
            self.second.set()
        return {}


def site(name: Any) -> Site:
    return Site(name, "127.0.0.1", lambda *_, **__: None)


PATHS: list[Callable[[LinkSpec, Any], Any]] = [
    lambda spec, slow: ForwarderPath(spec, (), site("near"), site("far"), slow),
    lambda spec, slow: RelayPath(spec, (), site("near"), site("far"), slow),
]


@pytest.mark.parametrize("open_path", PATHS, ids=["forwarder", "relay"])
def test_what_is_said_to_run_is_what_the_helper_was_told_last(open_path: Any) -> None:
    one, other = symmetric("link", 1e6, 0.010), symmetric("link", 2e6, 0.010)
    slow = Slow()
    path = open_path(symmetric("link", 3e6, 0.010), slow)
    early = threading.Thread(target=path.apply, args=(one,))
    early.start()
    slow.first.wait()
    path.apply(other)
    early.join()
    told = [str(request["near_to_far"]) for request in slow.asked]
    assert len(told) == 2
    path.apply(path.applied)
    assert str(slow.asked[2]["near_to_far"]) == told[1]
