"""Execution of one run under a schedule of faults: its command is restarted until the run has finished."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from s3_server import ACCESS_KEY, SECRET_KEY

from chaos.configs import ROOT, config_of, flow_module
from chaos.proxy import Armed
from chaos.schedule import Fault, Schedule
from chaos.servers import MARK, Testbed, kill_9

LIMIT_S = 1800.0
_OPTIM_STEP = "/api/v1/optim_step"


@dataclass(frozen=True, slots=True)
class Injected:
    """Injected fault, the seconds from the start of the run to the injection, and the request that it hit."""

    fault: Fault
    at_s: float
    hit: str


@dataclass(slots=True)
class ChaosRun:
    """Course of a run under faults.

    Attributes:
        name: run name.
        injected: injected faults in order of time; faults that were due after the end of the run are missing.
        exits: last output line of each command that exited with an error before the run had finished.
        num_starts: number of times the command was started.
        failure: reason why the run did not finish; empty if it finished.
    """

    name: str
    schedule: Schedule
    injected: list[Injected] = field(default_factory=list)
    exits: list[str] = field(default_factory=list)
    num_starts: int = 0
    seconds: float = 0.0
    failure: str = ""


def run_folder(testbed: Testbed, name: str) -> Path:
    """Return the folder of a run's config, home, temporary files and output."""
    return testbed.folder / "runs-under-faults" / name


def run_schedule(testbed: Testbed, schedule: Schedule, name: str) -> ChaosRun:
    """Execute one run to its end; all servers are up again on return."""
    runner = _Runner(testbed, schedule, name)
    try:
        runner.execute()
    finally:
        kill_9(runner.mark)
        for proxy in testbed.proxies.values():
            proxy.disarm()
    testbed.restart_all()
    return runner.run


class _Runner:
    def __init__(self, testbed: Testbed, schedule: Schedule, name: str) -> None:
        self.testbed = testbed
        self.run = ChaosRun(name, schedule)
        self.mark = f"{testbed.mark}flow:{name}"
        self._folder = run_folder(testbed, name)
        self._config = self._folder / "config.yaml"
        (self._folder / "tmp").mkdir(parents=True)
        self._config.write_text(yaml.safe_dump(config_of(testbed, schedule, name)))
        self._pending = list(schedule.faults)
        self._due_at: dict[Fault, float] = {}
        self._armed: list[Armed] = []
        self._initial_updates = self._updates()
        self._flow: subprocess.Popen[bytes] | None = None
        self._next_start = self._started = time.monotonic()

    def execute(self) -> None:
        while self._flow is None or self._flow.poll() != 0:
            self._start_or_check_flow()
            self.testbed.restart_due()
            for fault in tuple(self._pending):
                if self._is_due(fault) and self._inject(fault):
                    self._pending.remove(fault)
            if self._has_failed():
                break
            time.sleep(0.02)
        self.run.seconds = time.monotonic() - self._started
        hits = [Injected(armed.fault, armed.hit_at - self._started, armed.hit) for armed in self._armed if armed.hit]
        self.run.injected = sorted(self.run.injected + hits, key=lambda injected: injected.at_s)

    def _start_or_check_flow(self) -> None:
        if self._flow is None and time.monotonic() >= self._next_start:
            self._flow = self._start_flow()
        elif self._flow and self._flow.poll() not in (None, 0):
            self.run.exits.append(self._last_line())
            self._flow, self._next_start = None, time.monotonic() + 1

    def _start_flow(self) -> subprocess.Popen[bytes]:
        self.run.num_starts += 1
        with (self._folder / "output.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", flow_module(self.run.schedule.kind), "--config", str(self._config)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | _environment(self.testbed, self._folder) | {MARK: self.mark},
                start_new_session=True,
            )

    def _updates(self) -> int:
        return self.testbed.proxies["engine"].num_requests[_OPTIM_STEP]

    def _is_due(self, fault: Fault) -> bool:
        if self._updates() - self._initial_updates < fault.updates:
            return False
        return time.monotonic() >= self._due_at.setdefault(fault, time.monotonic() + fault.after_s)

    def _inject(self, fault: Fault) -> bool:
        """Inject a fault; return False if its target is not running at the moment."""
        if fault.action != "kill":
            self._armed.append(self.testbed.proxies[fault.target].arm(fault))
            return True
        if fault.target == "flow":
            if self._flow is None or self._flow.poll() is not None:
                return False
            kill_9(self.mark)
            self._flow.wait()
            self._flow, self._next_start = None, time.monotonic() + fault.seconds
        elif self.testbed.servers[fault.target].is_up():
            self.testbed.servers[fault.target].kill(fault.seconds)
        else:
            return False
        self.run.injected.append(Injected(fault, time.monotonic() - self._started, ""))
        return True

    def _has_failed(self) -> bool:
        if self.run.num_starts > 10 + len(self.run.schedule.faults):
            self.run.failure = f"it was started {self.run.num_starts} times and did not finish"
        elif time.monotonic() - self._started > LIMIT_S:
            self.run.failure = (
                f"it did not finish within {LIMIT_S:.0f} s; its thread stacks are in {self._folder}/output.log"
            )
            if self._flow and self._flow.poll() is None:
                self._flow.send_signal(signal.SIGABRT)  # faulthandler writes the stack of every thread
                self._flow.wait(20)
        return bool(self.run.failure)

    def _last_line(self) -> str:
        lines = (self._folder / "output.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no output"


def _environment(testbed: Testbed, folder: Path) -> dict[str, str]:
    return {
        "TINKER_FLOWS_HOME": str(folder / "home"),
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": testbed.url("prefect") + "/api",
        "TINKER_API_KEY": "tml-chaos",
        "AWS_ENDPOINT_URL_S3": testbed.url("s3"),
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "TMPDIR": str(folder / "tmp"),
        "PYTHONFAULTHANDLER": "1",
    }
