"""The engine process: start, API key and shutdown."""

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

pytestmark = pytest.mark.process

KEY = {"TINKER_ENGINE_API_KEY": "tml-right"}


def start_error(process: subprocess.Popen[str], folder: Path) -> str:
    """Wait for a failed start; return its error message."""
    with process:
        assert process.wait(timeout=60) == 1
    return (folder / "engine.log").read_text().splitlines()[-1]


def test_wrong_key_is_rejected(tmp_path: Path) -> None:
    with running_engine(tmp_path / "engine", environment=KEY) as engine:
        for key in ("tml-wrong", "tml-right2"):
            with pytest.raises(tinker.AuthenticationError, match="The API key is not the key of this engine"):
                tinker.ServiceClient(base_url=engine.url, api_key=key).create_lora_training_client("tiny")
        with tinker.ServiceClient(base_url=engine.url, api_key="tml-right") as service:
            service.create_lora_training_client(base_model="tiny", rank=1).result()


def test_engine_stops_when_its_parent_is_killed(tmp_path: Path) -> None:
    """The parent's end of standard input closes even on kill -9."""
    parent = (
        "import sys, time; from engine_process import start_engine; from pathlib import Path; "
        "engine = start_engine(Path(sys.argv[1])); print(engine.pid, engine.stdout.readline().strip(), flush=True); "
        "time.sleep(600)"
    )
    program = [sys.executable, "-c", parent, str(tmp_path / "engine")]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent) as process:
        assert process.stdout is not None
        try:
            pid, url = process.stdout.readline().split()
            assert url.startswith("http://127.0.0.1:")
            engine = os.pidfd_open(int(pid))
        finally:
            process.kill()
        exited, _, _ = select.select([engine], [], [], 60)
        os.close(engine)
    assert exited


def test_signal_stops_engine_cleanly_while_a_client_waits(tmp_path: Path) -> None:
    with running_engine(tmp_path / "engine") as engine:
        service = tinker.ServiceClient(base_url=engine.url, api_key="tml-any")
        trainer = service.create_lora_training_client(base_model="tiny", rank=1).result()
        trainer._reserve_request_ids(1)  # a gap in the seq ids: the next request waits forever
        waiting = trainer.optim_step(tinker.types.AdamParams())
        engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(timeout=60) == 0
        waiting.future().cancel()
        assert "Traceback" not in engine.log.read_text()
        service.holder.close()


def test_failed_start_prints_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = str(occupied.getsockname()[1])
        cases = {
            "port": ((), ("--port", port), {}, f"127.0.0.1:{port} cannot be bound"),
            "model": (("no/such/model/here",), (), {"HF_HUB_OFFLINE": "1"}, "no/such/model/here"),
            "host": (("tiny",), ("--host", "0.0.0.0"), {}, "set TINKER_ENGINE_API_KEY"),
            "key": (("tiny",), (), {"TINKER_ENGINE_API_KEY": "secret"}, "does not start with 'tml-'"),
        }
        processes = {
            name: start_engine(tmp_path / name, models or ("tiny",), arguments, environment)
            for name, (models, arguments, environment, _) in cases.items()
        }
        for name, (_, _, _, sentence) in cases.items():
            assert sentence in start_error(processes[name], tmp_path / name)


COUNT_THREADS = """
import os
import torch
from engine.serve import start_worker

def compute():
    torch.ones(2**22).exp()
    return len(os.listdir("/proc/self/task"))

worker = start_worker(2)
print(worker.call(compute), compute(), worker.call(torch.get_num_threads))
"""


def test_only_the_compute_thread_has_helper_threads() -> None:
    # Helper threads of the event loop's thread would slow down each operation of the compute thread.
    output = subprocess.run([sys.executable, "-c", COUNT_THREADS], check=True, capture_output=True, text=True).stdout
    in_worker, in_main, num_threads = map(int, output.split())
    assert in_main == in_worker
    assert num_threads == 2
