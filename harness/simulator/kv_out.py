"""How the KV of a prefill leaves its instance: by a path, over a link shared fairly, or in no time.

The part that is computed last leaves layer by layer as it is computed, with the state of layers
whose KV does not grow. Of a prompt that is computed in several parts each earlier one leaves in one
piece at its end, as SGLang sends its chunks. Of one sender to one receiver nothing overtakes: a
request has landed when its last part has.
"""

from collections.abc import Callable
from functools import partial

from harness.kv_path import KvPath
from harness.scheduling.scheduler_config import SchedulerConfig
from harness.simulator.link import Paths
from harness.simulator.records import Live

#: Keys of pieces lie beyond those of prefills, which are numbers, and of copies, which are -1 less.
_PIECE = 2**40


class KvOut:
    """``sent`` is called once with each request that has been prefilled and when all of its KV
    lands, infinite where the path stays down."""

    def __init__(
        self, config: SchedulerConfig, paths: Paths, sent: Callable[[Live, float], None]
    ) -> None:
        self._crossing = paths.crossing
        self._moved_bytes = config.moved_bytes
        self._sent = sent

    def offer(self, live: Live, path: KvPath | None, start_s: float, end_s: float) -> None:
        """The last part of a prefill, or all of it, is computed from ``start_s`` to ``end_s``."""
        tokens, sent_tokens = live.input_tokens, live.sent_tokens
        if path is not None:
            path.offer(live.number, start_s, end_s, tokens, sent_tokens)
        elif self._crossing is not None and live.route.crosses:
            self._crossing.offer(live.key, live.route, start_s, end_s, tokens, sent_tokens)

    def send_piece(self, live: Live, path: KvPath | None, tokens: int, now_s: float) -> None:
        """An earlier part is done, with which ``tokens`` of the prompt are computed."""
        if tokens <= live.sent_tokens:
            return
        nbytes = self._moved_bytes(tokens, live.sent_tokens) - self._moved_bytes(tokens, tokens)
        live.sent_tokens = tokens
        if path is not None:
            path.send(now_s, nbytes)
        elif self._crossing is not None and live.route.crosses:
            ends = live.route.prefill, live.route.decode
            line = (ends[0].name, ends[0].cluster), (ends[1].name, ends[1].cluster)
            live.pieces += 1
            self._crossing.send(_key(live, live.pieces), line, now_s, nbytes, _nobody)

    def end(self, live: Live, path: KvPath | None, now_s: float) -> None:
        """All is computed."""
        if path is not None:
            self._sent(live, path.landed_s(live.number, now_s))
        elif self._crossing is not None and live.route.crosses:
            self._crossing.wait(live.key, now_s, partial(self._sent, live))
        else:
            self._sent(live, now_s)

    def withdraw(self, live: Live, path: KvPath | None, now_s: float) -> None:
        """Nobody wants it any more; what was ready takes its turn, the rest never comes."""
        if self._crossing is not None and live.route.crosses:
            self._crossing.drop(live.key)
            for piece in range(1, live.pieces + 1):
                self._crossing.drop(_key(live, piece))
        elif path is not None:
            path.withdraw(live.number, now_s)


def _key(live: Live, piece: int) -> int:
    """Of a piece, counted from 1."""
    return piece * _PIECE + live.key


def _nobody(_landed_s: float) -> None:
    """Nobody waits for a piece by itself."""
