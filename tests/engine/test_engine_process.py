"""The process: how it starts, whom it lets in, how it ends."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import tinker
from engine_process import running_engine, start_engine

KEY = {"TINKER_ENGINE_API_KEY": "tml-right"}


def refusal(process: subprocess.Popen[str], folder: Path) -> str:
    """Why the engine did not start."""
    with process:
        assert process.wait(timeout=60) == 1
    return (folder / "engine.log").read_text().splitlines()[-1]


def test_only_the_right_key_enters(tmp_path: Path) -> None:
    with running_engine(tmp_path / "engine", environment=KEY) as engine:
        for key in ("tml-wrong", "tml-right2"):
            with pytest.raises(tinker.AuthenticationError, match="The API key is not the key of this engine"):
                tinker.ServiceClient(base_url=engine.url, api_key=key).create_lora_training_client("tiny")
        with tinker.ServiceClient(base_url=engine.url, api_key="tml-right") as service:
            service.create_lora_training_client(base_model="tiny", rank=1).result()


def test_it_ends_with_its_starter(tmp_path: Path) -> None:
    """The starter's end of standard input closes even when it is killed with -9."""
    starter = (
        "import sys, time; from engine_process import start_engine; from pathlib import Path; "
        "engine = start_engine(Path(sys.argv[1])); print(engine.pid, engine.stdout.readline().strip(), flush=True); "
        "time.sleep(600)"
    )
    program = [sys.executable, "-c", starter, str(tmp_path / "engine")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent) as process:
        assert process.stdout is not None
        pid, url = process.stdout.readline().split()
        assert url.startswith("http://127.0.0.1:")
        engine = os.pidfd_open(int(pid))
        process.kill()
        ended, _, _ = select.select([engine], [], [], 60)
        os.close(engine)
    assert ended


def test_a_signal_ends_it_cleanly_while_a_client_waits(tmp_path: Path) -> None:
    with running_engine(tmp_path / "engine") as engine:
        service = tinker.ServiceClient(base_url=engine.url, api_key="tml-any")
        trainer = service.create_lora_training_client(base_model="tiny", rank=1).result()
        trainer._reserve_request_ids(1)  # a gap: the next request waits for ever
        waiting = trainer.optim_step(tinker.types.AdamParams())
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(timeout=60) == 0
        waiting.future().cancel()
        assert "Traceback" not in engine.log.read_text()
        service.holder.close()


def test_it_says_why_it_does_not_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = {
            "port": ((), ("--port", port), {}, f"127.0.0.1:{port} cannot be listened on"),
            "model": (("no/such/model/here",), (), {"HF_HUB_OFFLINE": "1"}, "no/such/model/here"),
            "host": (("tiny",), ("--host", "0.0.0.0"), {}, "set TINKER_ENGINE_API_KEY"),
            "key": (("tiny",), (), {"TINKER_ENGINE_API_KEY": "secret"}, "does not start with 'tml-'"),
        }
        started = {
            name: start_engine(tmp_path / name, models or ("tiny",), arguments, environment)
            for name, (models, arguments, environment, _) in cases.items()
        }
        for name, (_, _, _, sentence) in cases.items():
            assert sentence in refusal(started[name], tmp_path / name)
