"""Execution of one run under a schedule of faults: its command is restarted until the run has finished."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from s3_server import ACCESS_KEY, SECRET_KEY

from chaos.clock import faked_clock
from chaos.configs import ROOT, config_of, flow_module, storage_of
from chaos.proxy import Armed
from chaos.schedule import ACTIONS, KILLS, LEASE_S, Fault, Schedule
from chaos.servers import MARK, Testbed, kill_9, send_signal

LIMIT_S = 3600.0
_OPTIM_STEP = "/api/v1/optim_step"
# Program of a process of the run: the run's command, with the lease of the chaos test.
_START = f"""
import runpy, sys
from blocks.files import lease
lease.LEASE_S = {LEASE_S}
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True)
class Injected:
    """Injected fault, the seconds from the start of the run to the injection, and the request or moment that it hit."""

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
        runner.continue_all()
        kill_9(runner.mark)
        for proxy in testbed.proxies.values():
            proxy.disarm()
    testbed.restart_all()
    return runner.run


@dataclass(frozen=True, slots=True)
class _Process:
    """Process that executes the run's command, and the mark of all processes that it starts."""

    popen: subprocess.Popen[bytes]
    mark: str


class _Runner:
    def __init__(self, testbed: Testbed, schedule: Schedule, name: str) -> None:
        self.testbed = testbed
        self.run = ChaosRun(name, schedule)
        self.mark = f"{testbed.mark}flow:{name}:"
        self._folder = run_folder(testbed, name)
        self._config = self._folder / "config.yaml"
        (self._folder / "tmp").mkdir(parents=True)
        self._config.write_text(yaml.safe_dump(config_of(testbed, schedule, name)))
        self._clock = self._folder / "clock"
        self._clock.write_text("+0")
        self._environment = _environment(testbed, self._folder)
        if any(fault.action == "set clock" for fault in schedule.faults):
            self._environment |= faked_clock(self._clock)
        self._pending = list(schedule.faults)
        self._due_at: dict[Fault, float] = {}
        self._armed: list[Armed] = []
        self._initial_updates = self._updates()
        self._processes: list[_Process] = []
        self._frozen: dict[str, float] = {}  # when to continue the processes with a mark
        self._is_finished = False
        self._next_start = self._started = time.monotonic()

    def execute(self) -> None:
        while not self._is_finished or self._processes:
            self._check_processes()
            self.testbed.restart_due()
            self._continue_due()
            for fault in () if self._is_finished else tuple(self._pending):
                if self._is_due(fault) and self._inject(fault):
                    self._pending.remove(fault)
            if self._has_failed():
                break
            time.sleep(0.02)
        self.run.seconds = time.monotonic() - self._started
        hits = [Injected(armed.fault, armed.hit_at - self._started, armed.hit) for armed in self._armed if armed.hit]
        self.run.injected = sorted(self.run.injected + hits, key=lambda injected: injected.at_s)

    def continue_all(self) -> None:
        """Continue all frozen processes."""
        for mark in self._frozen:
            send_signal(mark, signal.SIGCONT)
        self._frozen.clear()

    def _check_processes(self) -> None:
        """Note which processes have ended, and start the command if none is left and the run has not finished."""
        for process in tuple(self._processes):
            status = process.popen.poll()
            if status is None:
                continue
            self._processes.remove(process)
            if status == 0:
                self._is_finished = True
            else:
                self.run.exits.append(self._last_line())
                self._next_start = time.monotonic() + 1
        if not self._processes and not self._is_finished and time.monotonic() >= self._next_start:
            self._start()

    def _start(self) -> None:
        self.run.num_starts += 1
        mark = f"{self.mark}{self.run.num_starts:03d}"
        command = [sys.executable, "-c", _START, flow_module(self.run.schedule.kind), "--config", str(self._config)]
        with (self._folder / "output.log").open("ab") as log:
            popen = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self._environment | {MARK: mark},
                start_new_session=True,
            )
        self._processes.append(_Process(popen, mark))

    def _continue_due(self) -> None:
        for mark, at in tuple(self._frozen.items()):
            if time.monotonic() >= at:
                send_signal(mark, signal.SIGCONT)
                del self._frozen[mark]

    def _updates(self) -> int:
        return self.testbed.proxies["engine"].num_requests[_OPTIM_STEP]

    def _is_due(self, fault: Fault) -> bool:
        if fault not in self._due_at:
            has_samples = self.testbed.proxies["engine"].num_samples >= fault.samples
            if self._updates() - self._initial_updates < fault.updates or not has_samples:
                return False
        return time.monotonic() >= self._due_at.setdefault(fault, time.monotonic() + fault.after_s)

    def _inject(self, fault: Fault) -> bool:
        """Inject a fault; return False if its target is not running at the moment."""
        if fault.action in ACTIONS:
            self._armed.append(self.testbed.proxies[fault.target].arm(fault))
            return True
        is_injected = self._inject_into_flow(fault) if fault.target == "flow" else self._inject_into_server(fault)
        if is_injected:
            moment = "during a refill" if fault.samples else ""
            self.run.injected.append(Injected(fault, time.monotonic() - self._started, moment))
        return is_injected

    def _inject_into_server(self, fault: Fault) -> bool:
        server = self.testbed.servers[fault.target]
        if not server.is_up() or server.mark in self._frozen:
            return False
        if fault.action == "freeze":
            self._freeze(server.mark, fault.seconds)
        else:
            server.kill(fault.seconds)
        return True

    def _inject_into_flow(self, fault: Fault) -> bool:
        if not self._processes or self._processes[0].popen.poll() is not None:
            return False
        process = self._processes[0]
        if fault.action in KILLS:
            self._kill_flow()
            self._next_start = time.monotonic() + fault.seconds
            if fault.action == "start twice":
                self._start()
                self._start()
        elif fault.action == "remove directory":
            return self._remove_directory()
        elif fault.action == "set clock":
            self._clock.write_text(f"{fault.seconds:+.0f}")
        elif process.mark in self._frozen or len(self._processes) > 1:
            return False
        else:
            self._freeze(process.mark, fault.seconds)
            if fault.action == "freeze and replace":
                self._start()
        return True

    def _kill_flow(self) -> None:
        kill_9(self.mark)
        for process in self._processes:
            process.popen.wait()
            self._frozen.pop(process.mark, None)
        self._processes.clear()

    def _freeze(self, mark: str, seconds: float) -> None:
        send_signal(mark, signal.SIGSTOP)
        self._frozen[mark] = time.monotonic() + seconds

    def _remove_directory(self) -> bool:
        """Move the run's directory away and delete it; return False if it does not exist."""
        if self.run.schedule.storage == "s3":
            return self._remove_prefix()
        directory = Path(storage_of(self.testbed, self.run.schedule)) / self.run.name
        removed = directory.with_name(f"removed-{self.run.name}")
        if not directory.exists():
            return False
        directory.rename(removed)
        shutil.rmtree(removed)
        return True

    def _remove_prefix(self) -> bool:
        """Delete the objects of the run, the lease first; return False if there are none or the server is down."""
        server = self.testbed.servers["s3"]
        if not server.is_up() or server.mark in self._frozen:
            return False
        bucket = self.testbed.bucket()
        prefix = f"{storage_of(self.testbed, self.run.schedule).removeprefix('s3://')}/{self.run.name}"
        try:
            bucket.rm_file(f"{prefix}/.lock")
            for path in bucket.find(prefix):
                bucket.rm_file(path)
        except OSError:  # there is no such object, or the server is still starting
            return False
        return True

    def _has_failed(self) -> bool:
        if self.run.num_starts > 10 + 2 * len(self.run.schedule.faults):
            self.run.failure = f"it was started {self.run.num_starts} times and did not finish"
        elif time.monotonic() - self._started > LIMIT_S:
            self.run.failure = (
                f"it did not finish within {LIMIT_S:.0f} s; its thread stacks are in {self._folder}/output.log"
            )
            self.continue_all()
            for process in self._processes:
                process.popen.send_signal(signal.SIGABRT)  # faulthandler writes the stack of every thread
                process.popen.wait(120)
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
        "PYTHONPATH": str(ROOT / "tests"),
        "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "true",
        "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "1",
    }
