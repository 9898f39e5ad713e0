"""Local service that implements the Tinker API: ``python -m engine``."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from engine.allocator import keep_freed_memory
from engine.listen import LOOPBACK, PortError, bind, is_loopback
from engine.part import ERROR_PREFIX, part_of
from engine.service.settings import Settings

KEY_VARIABLE = "TINKER_ENGINE_API_KEY"


class StartError(Exception):
    """Failure to start the engine; the message is one sentence for the user."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine until a signal or Ctrl-C stops it; return the exit status."""
    # OpenMP reads these variables when torch is imported. Together they let an idle OpenMP thread spin for about ten
    # microseconds before it sleeps, long enough for the next operation of a pass to arrive. By default it spins for a
    # millisecond. With PASSIVE alone it sleeps after each operation, and waking it takes a third of the time of a
    # decoding step.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = _arguments().parse_args(arguments)
    devices = options.device or ["cpu"]
    name = "engine" if options.part is None else f"engine {options.part}"
    logging.basicConfig(stream=sys.stderr, format=f"%(asctime)s {name} %(levelname)s %(message)s", level=logging.INFO)
    try:
        settings = _settings(options, devices)
        if options.part is not None:
            threading.Thread(target=_exit_when_front_ends, daemon=True).start()
            _serve_engine(settings, bind(LOOPBACK, 0), exit_with_stdin=False)
        elif len(devices) == 1:
            _serve_engine(settings, bind(settings.host, settings.port), options.exit_with_stdin)
        else:
            _serve_engines(settings, arguments, devices, options.exit_with_stdin)
    except (StartError, PortError) as error:
        # A front, the process that serves several engines at one port, reads the standard output of its engines.
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr if options.part is None else sys.stdout, flush=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _serve_engine(settings: Settings, listener: socket.socket, exit_with_stdin: bool) -> None:
    # `serve` enables garbage collection once the models are loaded: until then, each collection would scan all imported
    # modules.
    gc.disable()
    keep_freed_memory()
    # These imports take seconds, so they come after the validation of the settings and the port.
    from engine.model_cache import ModelError
    from engine.serve import serve

    try:
        serve(settings, listener, exit_with_stdin)
    except ModelError as error:
        raise StartError(str(error)) from error


def _exit_when_front_ends() -> None:
    """Exit at once when standard input closes, which means that the front of this engine has ended.

    The engines of a restarted front need the session locks that this process holds.
    """
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def _serve_engines(settings: Settings, arguments: Sequence[str], devices: Sequence[str], exit_with_stdin: bool) -> None:
    listener = bind(settings.host, settings.port)
    from engine.front.processes import FrontError
    from engine.front.serve import serve_front

    try:
        serve_front(settings, listener, arguments, devices, exit_with_stdin)
    except FrontError as error:
        raise StartError(str(error)) from error


EPILOG = f"""\
environment:
  {KEY_VARIABLE}  API key that clients must send; required if --host is not a loopback address
  TINKER_FLOWS_HOME      project home; its folder cache/ contains the built-in models (default: .tinker-flows)

clients:
  TINKER_BASE_URL=<the printed URL> TINKER_API_KEY=<the API key, or any value that starts with tml->
  HF_ENDPOINT=<the printed URL> lets clients load the tokenizers of the served models by name

Open the URL in a browser to see a status page. Prometheus metrics are at <URL>/metrics.
"""


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine",
        description="Local service that implements the Tinker API: LoRA training and sampling for the official SDK.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        action="append",
        required=True,
        help="tiny, smollm2-135m, a Hugging Face directory or a hub name; repeat the option to serve several models",
    )
    parser.add_argument("--state", type=Path, required=True, help="folder for checkpoints, runs and sessions")
    parser.add_argument(
        "--port",
        type=int,
        required=True,
        help="port to listen on, 0 for a free port; the engine prints its URL when ready",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")

    compute = parser.add_argument_group("compute")
    compute.add_argument(
        "--device",
        action="append",
        help="torch device (default: cpu); repeat the option to start one engine process per device, all behind one "
        "port",
    )
    compute.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "autocast-bf16"),
        help="dtype of the weights; autocast-bf16 has float32 weights and bfloat16 matrix products (default: float32)",
    )
    compute.add_argument(
        "--threads",
        type=int,
        help="number of torch threads of each engine (default: chosen by torch; engines on the CPU share that number)",
    )
    compute.add_argument(
        "--deterministic",
        action="store_true",
        help="make samples bitwise independent of concurrent requests, in float32 on a CPU",
    )
    compute.add_argument(
        "--memory-limit",
        type=_mebibytes,
        metavar="MIB",
        help="memory of each engine for adapters, optimizer moments, gradients and snapshots (copies of weights that "
        "samplers use but that were never saved by name); the least recently used are moved to disk (default: half of "
        "the machine's memory; on a GPU, a quarter of the memory that the models leave; engines on one device share "
        "it)",
    )

    behaviour = parser.add_argument_group("behaviour")
    behaviour.add_argument(
        "--clock-cycle",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="start training requests only every SECONDS, as the hosted service does (default: immediately)",
    )
    behaviour.add_argument(
        "--retrieve-futures",
        action="store_true",
        help="let each sampling client wait for all its samples with one request instead of one per sample",
    )
    behaviour.add_argument("--log-requests", action="store_true", help="log one line of JSON per request")
    behaviour.add_argument("--exit-with-stdin", action="store_true", help="exit when standard input is closed")
    # The engine's number among the devices, set by the front that starts it.
    behaviour.add_argument("--part", type=int, help=argparse.SUPPRESS)
    return parser


def _mebibytes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of mebibytes; use an integer of at least 1")
    return int(text) * 2**20


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 3600:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds; use a number of at least 0 and below 3600"
        )
    return value


def _settings(options: argparse.Namespace, devices: Sequence[str]) -> Settings:
    key = os.environ.get(KEY_VARIABLE) or None
    if key is None and not is_loopback(options.host):
        raise StartError(
            f"Other machines can reach an engine on {options.host}, so it needs an API key: set {KEY_VARIABLE} to a "
            "key that starts with 'tml-' and give it to the clients, or listen on 127.0.0.1."
        )
    if key is not None and not key.startswith("tml-"):
        raise StartError(
            f"{KEY_VARIABLE} does not start with 'tml-': change it, because the Tinker SDK sends only keys with this "
            "prefix."
        )
    home = Path(os.environ.get("TINKER_FLOWS_HOME") or ".tinker-flows")
    return Settings(
        models=tuple(dict.fromkeys(options.model)),
        state=options.state,
        cache=home / "cache",
        host=options.host,
        port=options.port,
        device=devices[options.part or 0],
        dtype=options.dtype,
        threads=options.threads,
        deterministic=options.deterministic,
        api_key=key,
        retrieve_futures=options.retrieve_futures,
        memory_limit_bytes=options.memory_limit,
        clock_cycle_s=options.clock_cycle,
        log_requests=options.log_requests,
        part=part_of(options.part or 0, devices),
    )


if __name__ == "__main__":
    os.umask(0o077)  # checkpoints and journals are the owner's
    # None makes a package appear as not installed. transformers imports both for functions that the engine does not
    # call, which takes a second.
    sys.modules["scipy"] = sys.modules["sklearn"] = None  # pyright: ignore[reportArgumentType]
    sys.exit(main())
