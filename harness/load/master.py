"""Locust's master with an entrance: only workers that know the token take part.

A worker says ``client_ready``, gets a ``challenge``, answers ``register`` with its proof, and gets
``welcome`` with the master's (``harness.load.admission``); only then is Locust told of it, and only
then is anything else that it sends read. The run is the schedule's, so Locust neither stops it nor
spreads a lost worker's users over the others: their requests have their own places in the schedule.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import gevent
from locust import __version__ as locust_version
from locust.env import Environment
from locust.exception import RPCError
from locust.rpc import Message
from locust.runners import STATE_RUNNING, MasterRunner

from harness.load.admission import NONCE_BYTES, new_nonce, proof, proves

logger = logging.getLogger(__name__)

#: Workers that said they are there and have not proved it; more are not even asked.
MAX_CHALLENGES = 256

#: (name, what it said of itself) -> None, or why it is not wanted.
Admit = Callable[[str, dict[str, Any]], str | None]


class LoadMaster(MasterRunner):  # type: ignore[misc]  # locust is not checked here
    """``admit`` is asked about each worker that has proved to know the token."""

    def __init__(
        self, environment: Environment, host: str, port: int, token: str, admit: Admit
    ) -> None:
        self._token = token
        self._admit = admit
        self._challenges: dict[str, bytes] = {}
        self._admitted: set[str] = set()
        self._started = False
        #: When each worker last said anything, by time.monotonic().
        self.heard_s: dict[str, float] = {}
        super().__init__(environment, host, port)

    @property
    def port(self) -> int:
        return int(self.server.port)

    def start(self, *arguments: Any, **options: Any) -> None:
        """Spawn the users, once: Locust would do it again when a worker comes or goes."""
        if not self._started:
            self._started = True
            super().start(*arguments, **options)

    def stop(self, send_stop_to_client: bool = True) -> None:
        """Only as a part of ``quit``: a run ends when its schedule does, or when we halt it."""
        if not send_stop_to_client:
            super().stop(send_stop_to_client=False)

    def all_running(self) -> bool:
        """Whether each admitted worker has its user."""
        return all(self.clients[name].state == STATE_RUNNING for name in self._admitted)

    def client_listener(self) -> None:
        """Read what comes, whoever sends it; what cannot be read is nobody's."""
        while True:
            try:
                name, message = self.server.recv_from_client()
            except RPCError:
                gevent.sleep(0.01)
                continue
            except Exception as error:  # noqa: BLE001 - bytes of strangers; any decoder's error
                logger.warning("unreadable bytes came to the master's port: %s", error)
                continue
            self.handle_message(name, message)

    def handle_message(self, client_id: str, msg: Message) -> None:
        if client_id in self._admitted and msg.node_id == client_id:
            self.heard_s[client_id] = time.monotonic()
            if msg.type != "client_ready":  # said again while the answer was on its way
                super().handle_message(client_id, msg)
        elif msg.type == "client_ready":
            self._challenge(client_id)
        elif msg.type == "register":
            self._register(client_id, msg.data)

    def _challenge(self, name: str) -> None:
        if name not in self._challenges:
            if len(self._challenges) >= MAX_CHALLENGES:
                self._challenges.pop(next(iter(self._challenges)))
            self._challenges[name] = new_nonce()
        self.send_message("challenge", {"nonce": self._challenges[name]}, name)

    def _register(self, name: str, said: Any) -> None:
        nonce = self._challenges.pop(name, None)
        theirs = said.get("nonce") if isinstance(said, dict) else None
        if nonce is None or not isinstance(theirs, bytes) or len(theirs) != NONCE_BYTES:
            return
        if not proves(said.get("proof"), self._token, "worker", nonce, theirs, name):
            logger.warning("a worker with a wrong token was refused")
            self.send_message("refused", {"why": "its token is not this run's"}, name)
            return
        why_not = self._admit(name, said)
        if why_not is not None:
            self.send_message("refused", {"why": why_not}, name)
            return
        self._admitted.add(name)
        self.heard_s[name] = time.monotonic()
        shown = proof(self._token, "master", nonce, theirs, name)
        self.send_message("welcome", {"proof": shown}, name)
        super().handle_message(name, Message("client_ready", locust_version, name))
