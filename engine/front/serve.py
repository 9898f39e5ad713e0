"""The front process: start the engines, run the server, shut down cleanly."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn

from engine.front.app import make_front
from engine.front.forward import EngineClient
from engine.front.processes import EngineProcess
from engine.listen import url_of
from engine.service.settings import Settings

log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """HTTP server that leaves signals to the front."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve_front(
    settings: Settings, listener: socket.socket, arguments: Sequence[str], devices: Sequence[str], exit_with_stdin: bool
) -> None:
    """Start an engine per device, print the URL when all are ready, and serve until SIGTERM or SIGINT.

    Args:
        arguments: command-line arguments, which apply to every engine.

    Raises:
        FrontError: an engine did not start, at the start or after it had ended.
    """
    engines = [EngineProcess(index, device, arguments) for index, device in enumerate(devices)]
    asyncio.run(_run(engines, settings, listener, exit_with_stdin))
    log.info("Stopped")


async def _run(
    engines: Sequence[EngineProcess], settings: Settings, listener: socket.socket, exit_with_stdin: bool
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if exit_with_stdin:
        threading.Thread(target=_set_at_end_of_stdin, args=(stop, loop), daemon=True).start()
    client = EngineClient()
    config = uvicorn.Config(
        make_front(engines, client, settings),
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
        lifespan="off",
        server_header=False,  # the engines set both headers
        date_header=False,
    )
    server = _Server(config)

    async def serve() -> None:
        await asyncio.gather(*(engine.is_up.wait() for engine in engines))
        listener.listen(128)
        url = url_of(settings.host, listener)
        print(url, flush=True)
        log.info("Serving %d engines on %s", len(engines), url)
        await server.serve(sockets=[listener])

    running = [asyncio.create_task(engine.run()) for engine in engines]
    serving = asyncio.create_task(serve())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([*running, serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    for engine in engines:
        engine.stop()  # the engines release the clients that wait for results
    if server.started:
        server.should_exit = True
    else:
        serving.cancel()
    ended = await asyncio.gather(serving, *running, return_exceptions=True)
    await client.close()
    for error in ended:
        if isinstance(error, Exception):
            raise error


def _set_at_end_of_stdin(stop: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    loop.call_soon_threadsafe(stop.set)
