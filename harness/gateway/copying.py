"""A prefix's KV on its way from one cluster's pool to another's, before the prefill that uses it.

The destination says where it takes the KV (``POST /expect_prefix``), the source sends it there and
answers once it is acknowledged (``POST /copy_prefix``). Where that fails the destination is told,
and waits no longer (``POST /forget_prefix``).
"""

import asyncio
import contextlib
import secrets
import sys

import msgspec

from harness.core import EngineError
from harness.gateway.upstream import Upstream
from harness.scheduling.events import CopyPrefix

#: Whoever gives a copy up is not held up by it for longer, wall time.
FORGET_WITHIN_S = 1.0


class _Place(msgspec.Struct):
    """Where the destination takes the KV, and how much of the prefix it has already."""

    host: str
    port: int
    resident_tokens: int


async def copy_prefix(upstream: Upstream, copy: CopyPrefix, keys: tuple[int, ...]) -> bool:
    """Whether the prefix is there now. Where it is not, the prefill computes it: that costs time
    and changes no answer."""
    room = secrets.randbits(60)
    asked = {"room": room, "keys": keys, "tokens": copy.tokens}
    source = {"source": upstream.address(copy.source)}
    try:
        raw = await upstream.ask(
            copy.destination, "POST", "/expect_prefix", msgspec.json.encode(asked | source)
        )
        place = msgspec.to_builtins(msgspec.json.decode(raw, type=_Place))
        await upstream.ask(copy.source, "POST", "/copy_prefix", msgspec.json.encode(asked | place))
    except asyncio.CancelledError:
        await _forget(upstream, copy, room)
        raise
    except (EngineError, msgspec.MsgspecError) as error:
        await _forget(upstream, copy, room)
        print(f"{copy.tokens} tokens of KV were not copied: {error}", file=sys.stderr)
        return False
    return True


async def _forget(upstream: Upstream, copy: CopyPrefix, room: int) -> None:
    """The destination would wait for KV that nobody sends, with memory set aside."""
    body = msgspec.json.encode({"room": room})
    with contextlib.suppress(EngineError, TimeoutError):  # then it waits until its deadline
        async with asyncio.timeout(FORGET_WITHIN_S):
            await upstream.ask(copy.destination, "POST", "/forget_prefix", body)
