"""``python -m engine``: a local service that speaks the Tinker API."""

from __future__ import annotations

import argparse
import ipaddress
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.listen import PortError, bind
from engine.service.settings import Settings

KEY_VARIABLE = "TINKER_ENGINE_API_KEY"


class StartError(Exception):
    """The engine cannot start; the message is one sentence for the user."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the engine until it is told to stop; returns the exit status."""
    # OpenMP reads it when torch is imported: threads that spin while they wait steal the others' time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s engine %(levelname)s %(message)s", level=logging.INFO)
    options = _arguments().parse_args(argv)
    try:
        settings = _settings(options)
        listener = bind(settings.host, settings.port)
        # These take seconds: what can be wrong before them is said before them.
        from engine.model_cache import ModelError
        from engine.serve import serve

        try:
            serve(settings, listener, stop_with_stdin=options.exit_with_stdin)
        except ModelError as error:
            raise StartError(str(error)) from error
    except (StartError, PortError) as error:
        print(f"engine: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m engine", description=__doc__)
    parser.add_argument(
        "--model", action="append", required=True, help="a built-in name or a model directory; repeatable"
    )
    parser.add_argument("--state", type=Path, required=True, help="the folder of checkpoints and training runs")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one; the URL is printed when ready")
    parser.add_argument("--host", default="127.0.0.1", help=f"other than loopback needs a key in ${KEY_VARIABLE}")
    parser.add_argument("--device", default="cpu", help="a torch device (default: cpu)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "autocast-bf16"))
    parser.add_argument("--threads", type=int, help="of torch (default: torch's own choice)")
    parser.add_argument(
        "--retrieve-futures", action="store_true", help="one waiting request per sampling client, not per sample"
    )
    parser.add_argument("--exit-with-stdin", action="store_true", help="stop when standard input is closed")
    return parser


def _settings(options: argparse.Namespace) -> Settings:
    key = os.environ.get(KEY_VARIABLE) or None
    if key is None and not _is_loopback(options.host):
        raise StartError(
            f"Listening on {options.host} lets others in: set {KEY_VARIABLE} to a key that starts with "
            "'tml-', which clients then send, or use 127.0.0.1."
        )
    if key is not None and not key.startswith("tml-"):
        raise StartError(
            f"{KEY_VARIABLE} does not start with 'tml-', and the Tinker SDK sends no other keys: change it."
        )
    home = Path(os.environ.get("TINKER_FLOWS_HOME") or ".tinker-flows")
    return Settings(
        models=tuple(dict.fromkeys(options.model)),
        state=options.state,
        cache=home / "cache",
        host=options.host,
        port=options.port,
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        api_key=key,
        retrieve_futures=options.retrieve_futures,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


if __name__ == "__main__":
    sys.exit(main())
