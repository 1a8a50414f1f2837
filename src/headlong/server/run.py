"""`serve`: from settings to a server that runs until it is told to stop, and then finishes what it has.

Binds first, so that a port in use is known before a model is loaded. A first SIGINT or SIGTERM drains: new requests
get 503, running ones have `drain_timeout` to end; a second one does not wait.
"""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from headlong import tracing
from headlong.checkpoint.generation import in_words
from headlong.engine.client import EngineLoader
from headlong.errors import ConfigError
from headlong.printable import printable
from headlong.progress import default_progress
from headlong.server import logs
from headlong.server.app import build_app
from headlong.server.auth import Auth, is_loopback
from headlong.server.hung import end_if_hung
from headlong.server.loop_errors import LoopErrors
from headlong.server.pool import Model, ModelPool
from headlong.server.protocol import Limits, guarded
from headlong.server.settings import Settings
from headlong.server.settings_sources import suspicious_variables

log = logging.getLogger(__name__)
CLOSING_SECONDS = 2
"""Seconds that connections get to close after the last request has ended."""
SWITCH_SECONDS = 0.0005
"""How long a thread that computes keeps the interpreter's lock while another one asks for it."""
SPARE_FILES = 256
"""File descriptors for everything but connections."""


def serve(settings: Settings, loader: EngineLoader, leave: Callable[[], None] = lambda: None) -> int:
    """Serves models that the loader makes engines for, until a signal; the exit code. `leave` is called when the server
    begins to end."""
    logs.setup(level=settings.log_level, format=settings.log_format, prompts=settings.log_prompts)
    for sentence in suspicious_variables():
        log.warning(sentence)
    tracing.start("headlong")
    with bind(settings) as listener:
        exposed = not is_loopback(listener.getsockname()[0])
        auth = Auth(settings.api_keys, settings.admin_keys, exposed)
        _warn_if_open(settings, auth, exposed)
        _allow_connections(settings.max_connections)
        asyncio.run(_run(settings, loader, auth, listener, leave))
    return 0


async def _run(
    settings: Settings,
    loader: EngineLoader,
    auth: Auth,
    listener: socket.socket,
    leave: Callable[[], None],
) -> None:
    asyncio.get_running_loop().set_exception_handler(LoopErrors())
    _let_others_run()
    pool = ModelPool(settings, loader)
    model = await pool.start(default_progress())
    app = build_app(settings, pool, auth)
    server = _Server(
        uvicorn.Config(
            app,
            http=guarded(Limits.of(settings), app.state.server.errors.count),
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=settings.keep_alive,  # type: ignore[arg-type]  # passed on to the loop's clock
            timeout_graceful_shutdown=CLOSING_SECONDS,
        )
    )
    with _signals() as stop:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        watching = asyncio.create_task(end_if_hung(pool))
        while not server.started and not serving.done():
            await asyncio.sleep(0.01)
        if serving.done():
            await serving
        if (why := model.client.description.slow) is not None:
            log.warning(why)
        log.info("sampling where a request does not say: %s", in_words(model.sampling))
        _announce(announcement(listener, model))
        await _first(stop.get(), serving)
        leave()
        app.state.server.limit.draining = True
        log.info("draining; a second signal ends it at once")
        await _first(pool.idle(), stop.get(), serving, seconds=settings.drain_timeout)
        # Whatever still runs ends here, with an error its client can read.
        await pool.close()
        server.should_exit = True
        await serving
        watching.cancel()


def _let_others_run() -> None:
    """Keeps one thread from holding up the others: to look for garbage among all modules takes more than a tenth of a
    second, and a step of an engine asks for the interpreter's lock dozens of times, each time for one interval."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_SECONDS)


def _announce(line: str) -> None:
    try:
        print(printable(line), flush=True)
    except OSError as error:  # a full device, or a reader that has left
        log.warning("stdout cannot be written (%s); %s", error.strerror, line)


def announcement(listener: socket.socket, model: Model) -> str:
    """The line that says where the server listens, which model it serves and how it drafts."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    drafting = model.client.description.drafting
    if drafting.refusal is not None:
        told = f"MTP off: {drafting.refusal}"
    elif not drafting.wanted:
        told = "MTP off unless a request asks for it: draft_tokens is 0"
    elif drafting.adaptive:
        told = f"MTP on: drafts where it pays, at most {drafting.deepest} per step"
    else:
        told = f"MTP on: up to {drafting.wanted} drafts per step, at most {drafting.deepest}"
    return f"headlong serves {model.id} at http://{shown}:{port} · {told}"


def bind(settings: Settings) -> socket.socket:
    """Returns a socket at the address that is not listening yet."""
    try:
        found = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host: {settings.host!r} is no address of this machine ({error})") from None
    # A name may stand for both kinds of address; clients try IPv4 in any case.
    family, *_, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port: {settings.port} on {settings.host} cannot be used ({error.strerror}); choose another with "
            "--port, or 0 for a free one"
        ) from None
    return listener


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves the signals to us."""

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()


@contextlib.contextmanager
def _signals() -> "Iterator[asyncio.Queue[int]]":
    """SIGINT and SIGTERM as they come, instead of what they usually do."""
    loop, seen = asyncio.get_running_loop(), asyncio.Queue[int]()
    names = (signal.SIGINT, signal.SIGTERM)
    before = {
        name: signal.signal(name, lambda number, _: loop.call_soon_threadsafe(seen.put_nowait, number))
        for name in names
    }
    try:
        yield seen
    finally:
        for name, handler in before.items():
            signal.signal(name, handler)


async def _first(*things: object, seconds: float | None = None) -> None:
    """Waits until one of them has happened; the server's own task is left running."""
    tasks = [asyncio.ensure_future(thing) for thing in things]  # type: ignore[arg-type]
    await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for thing, task in zip(things, tasks, strict=True):
        if task is not thing:
            task.cancel()


def _warn_if_open(settings: Settings, auth: Auth, exposed: bool) -> None:
    if exposed and not settings.api_keys:
        log.warning(
            "%s is not loopback and there is no API key: everybody who reaches this port can use the model; "
            "set api_keys (`headlong keys` makes one) or host 127.0.0.1",
            settings.host,
        )
    if exposed and not auth.has_keys:
        log.warning("admin endpoints are off: they need admin_keys on a server that others can reach")
    if "*" in settings.cors_origins and not settings.api_keys:
        log.warning(
            "cors_origins is * and there is no API key: every web page its visitors open can use the model"
        )


def _allow_connections(count: int) -> None:
    """Raises this process's own limit on open files where it would stop connections before ours does."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + SPARE_FILES
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning(
            "max_connections is %d, but this process may open %d files only; see `ulimit -n`", count, allowed
        )
