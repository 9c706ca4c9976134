"""Locust's own web UI over a run: to look at, not to drive it.

It serves from a socket that its parent listens on, which belongs to the parent's network even where
the load runs in a namespace of its own, and which outlives this process. Whatever would change the
run (start, stop, reset) is refused: the schedule decides.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from flask import Response, make_response, request
from gevent import pywsgi, socket
from locust.env import Environment


@contextmanager
def web_ui(environment: Environment, listener_fd: int) -> Iterator[None]:
    """The web UI of an environment that has its runner, until the end of the block."""
    ui = environment.create_web_ui(host="127.0.0.1", port=0, delayed_start=True)
    ui.app.before_request(_refuse_changes)
    listener = socket.socket(fileno=listener_fd)
    listener.setblocking(False)
    ui.server = pywsgi.WSGIServer(listener, ui.app, log=None)
    ui.server.start()
    try:
        yield
    finally:
        ui.server.stop(timeout=1)


def _refuse_changes() -> Response | None:
    if request.method in {"GET", "HEAD"}:
        return None
    return make_response("The schedule drives this run; the page only shows it.", 403)
