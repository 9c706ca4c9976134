"""HTTP servers and background tasks as things that an exit stack takes down."""

import asyncio
import hmac
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from harness.core import PrfaasError

#: Waiting connections; bursts of a few hundred arrive within one turn of a busy event loop.
BACKLOG = 1024


async def serve_http(
    stack: AsyncExitStack,
    application: web.Application,
    host: str,
    port: int,
    blame: type[PrfaasError],
) -> int:
    """Serve until the stack closes; gives the port. ``blame`` is raised when it cannot listen.

    A handler is cancelled when its client goes away, so that upstream work ends with it.
    """
    runner = web.AppRunner(
        application, handler_cancellation=True, access_log=None, shutdown_timeout=1.0
    )
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    listening = _listen(host, port, blame)
    await web.SockSite(runner, listening, backlog=BACKLOG).start()
    return int(listening.getsockname()[1])


def _listen(host: str, port: int, blame: type[PrfaasError]) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit it: a first token must not wait for an acknowledgement.
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise blame(
            f"cannot listen on {host}:{port}: {error.strerror or error}; "
            "choose another port, or 0 for a free one"
        ) from error
    return listening


#: What a balancer asks before it knows a key, as SGLang's own servers have it.
OPEN_PATHS = frozenset({"/health"})


def bearer(key: str, refuse: Callable[[], web.Response]) -> Middleware:
    """Middleware that lets only requests with ``key`` as their bearer token through."""
    wanted = f"Bearer {key}".encode()

    @web.middleware
    async def authorized(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN_PATHS:
            return await handler(request)
        given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
        return await handler(request) if hmac.compare_digest(given, wanted) else refuse()

    return authorized


async def arrival_mono_ns() -> int:
    """Now, for the first statement of a handler: when its request was seen.

    Handlers of requests that arrived together start one after another; giving way once lets all of
    them take their time before the first one works, so that its work does not hide in their wait.
    """
    now_ns = time.monotonic_ns()
    await asyncio.sleep(0)
    return now_ns


async def read_body(request: web.Request, max_bytes: int) -> bytes:
    """The whole body; 413 as soon as its announced length is over the bound, before a byte comes.

    A body without an announced length is bounded by the application's ``client_max_size``.
    """
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise web.HTTPUnsupportedMediaType(text="send the body without a content encoding")
    if (request.content_length or 0) > max_bytes:
        raise web.HTTPRequestEntityTooLarge(max_bytes, request.content_length or 0)
    return await request.read()


@asynccontextmanager
async def running(coroutine: Coroutine[object, object, None]) -> AsyncIterator[asyncio.Task[None]]:
    """Run a loop in the background; a failure of it surfaces when the context ends."""
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
