"""The engine process: load the models, run the server, shut down cleanly."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading

import torch
import uvicorn
from transformers.utils.logging import disable_progress_bar

from engine.compute.base import BaseModel
from engine.listen import LOOPBACK, url_of
from engine.models import ModelError, load_model, resolve_model
from engine.routes.app import make_app
from engine.sampling.self_test import checked_base
from engine.service.engine import Engine
from engine.service.settings import Settings
from engine.service.worker import Worker

log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """HTTP server whose shutdown first releases the clients that wait for results."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._engine.futures.release_waiters()
        await super().shutdown(sockets)


def serve(settings: Settings, listener: socket.socket, exit_with_stdin: bool) -> None:
    """Load the models, print the URL when the server is ready, and serve until SIGTERM or SIGINT.

    Raises:
        ModelError: a model cannot be found or loaded, the engine does not support it, or `settings.deterministic` is
            impossible on this machine.
    """
    worker = start_worker(settings.threads or max(1, torch.get_num_threads() // settings.part.on_device))
    engine = Engine(settings, worker.call(lambda: _load_models(settings)), worker)
    gc.freeze()  # no collection, not even the one at exit, scans the modules of torch and transformers
    gc.enable()
    config = uvicorn.Config(
        make_app(engine), log_level="warning", access_log=False, timeout_graceful_shutdown=5, lifespan="off"
    )
    server = _Server(config, engine)
    if exit_with_stdin:
        threading.Thread(target=_exit_with_stdin, args=(server,), daemon=True).start()
    for number in (signal.SIGTERM, signal.SIGINT):
        # uvicorn re-raises the signal under the handler it replaced; this handler prevents death by the signal.
        signal.signal(number, lambda *_: setattr(server, "should_exit", True))
    listener.listen(128)
    url = url_of(settings.host if settings.part.count == 1 else LOOPBACK, listener)
    print(url, flush=True)
    log.info("Serving %s on %s", ", ".join(engine.bases), url)
    server.run(sockets=[listener])
    engine.stop()
    log.info("Stopped")


def start_worker(num_threads: int) -> Worker:
    """Start the compute thread with ``num_threads`` threads for its operations, and give this thread one.

    OpenMP keeps helper threads for each thread that has computed in parallel. As soon as all of them outnumber the
    processors, each operation waits for its helpers to wake up: a token of SmolLM2 took 42 ms instead of 28 ms.
    """
    torch.set_num_threads(1)
    torch.get_num_threads()  # binds the number to this thread
    worker = Worker()
    worker.call(lambda: torch.set_num_threads(num_threads))
    return worker


def _load_models(settings: Settings) -> dict[str, BaseModel]:
    disable_progress_bar()  # progress bars clutter the log
    # cuDNN plans the attention of each new length, which takes longer than the attention itself.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if settings.deterministic:
        _check_settings(settings)
    bases = {}
    for name in settings.models:
        path = resolve_model(name, settings.cache)
        loaded = load_model(path, settings.device, settings.dtype, name)
        if loaded.device.index is not None:
            torch.cuda.set_device(loaded.device)  # this thread captures CUDA graphs on its current device
        bases[name] = checked_base(loaded)
        if options := bases[name].options_without_layers:
            log.warning(
                "%s has no linear layers for %s, so adapters leave these parts of the model as they are",
                *(name, " and ".join(options)),
            )
        if settings.deterministic and bases[name].has_other_products:
            raise ModelError(
                f"--deterministic is not possible for {name}, which computes matrix products in other layers than "
                "torch.nn.Linear, such as experts: omit --deterministic."
            )
        if settings.deterministic and not bases[name].keeps_bits():
            raise ModelError(
                f"--deterministic is not possible for {name} on this processor, whose matrix products give a row "
                "different bits in batches of different sizes: omit --deterministic."
            )
    return bases


def _check_settings(settings: Settings) -> None:
    """Raise a ModelError if samples would depend on concurrent requests in spite of ``settings.deterministic``."""
    if settings.device != "cpu" or settings.dtype != "float32" or not torch.backends.mkldnn.is_available():
        onednn = "with" if torch.backends.mkldnn.is_available() else "without"
        raise ModelError(
            f"--deterministic requires --device cpu, --dtype float32 and a torch with oneDNN, but this engine has "
            f"{settings.device}, {settings.dtype} and a torch {onednn} oneDNN: change them, or omit --deterministic."
        )


def _exit_with_stdin(server: uvicorn.Server) -> None:
    """Stop the server when standard input closes. The parent process holds the other end, which closes on its death."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    server.should_exit = True
