"""``python -m engine``: a local service that speaks the Tinker API."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from engine.listen import PortError, bind, is_loopback
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


EPILOG = f"""\
environment:
  {KEY_VARIABLE}  the key that clients must send; needed where others can reach the engine
  TINKER_FLOWS_HOME      where built-in models are made (default: .tinker-flows)

clients:
  TINKER_BASE_URL=<the printed URL> TINKER_API_KEY=tml-<anything, or the key>
  HF_ENDPOINT=<the printed URL> finds the served models' tokenizers by name

The URL is also a page for a browser, and <URL>/metrics is for Prometheus.
"""


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m engine",
        description="A local service that speaks the Tinker API: LoRA training and sampling for the real SDK.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        action="append",
        required=True,
        help="tiny, smollm2-135m, a Hugging Face directory or hub name; repeat it to serve several",
    )
    parser.add_argument("--state", type=Path, required=True, help="the folder of checkpoints, runs and sessions")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one; the URL is printed when ready")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1)")

    compute = parser.add_argument_group("compute")
    compute.add_argument("--device", default="cpu", help="a torch device (default: cpu)")
    compute.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "autocast-bf16"))
    compute.add_argument("--threads", type=int, help="of torch (default: torch's own choice)")
    compute.add_argument(
        "--deterministic",
        action="store_true",
        help="sample to the same bits whatever is sampled beside it, at up to three times the time",
    )
    compute.add_argument(
        "--memory-limit",
        type=_megabytes,
        metavar="MB",
        help="of adapters, moments and snapshots; the least recently used wait on disk (default: half of the memory)",
    )

    behaviour = parser.add_argument_group("behaviour")
    behaviour.add_argument(
        "--clock-cycle",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="start training only on the ticks of a clock, as the hosted service does (default: at once)",
    )
    behaviour.add_argument(
        "--retrieve-futures", action="store_true", help="one waiting request per sampling client, not per sample"
    )
    behaviour.add_argument("--log-requests", action="store_true", help="log a line of JSON for each request")
    behaviour.add_argument("--exit-with-stdin", action="store_true", help="stop when standard input is closed")
    return parser


def _megabytes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of megabytes from 1 up")
    return int(text) * 2**20


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds from 0 to 3600")
    return value


def _settings(options: argparse.Namespace) -> Settings:
    key = os.environ.get(KEY_VARIABLE) or None
    if key is None and not is_loopback(options.host):
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
        deterministic=options.deterministic,
        api_key=key,
        retrieve_futures=options.retrieve_futures,
        memory_limit_bytes=options.memory_limit or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2,
        clock_cycle_s=options.clock_cycle,
        log_requests=options.log_requests,
    )


if __name__ == "__main__":
    sys.exit(main())
