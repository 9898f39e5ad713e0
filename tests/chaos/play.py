"""One run under one schedule: started by its command, again after each kill, until it is finished."""

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

from chaos.configs import ROOT, config_of, flow_of
from chaos.proxy import Armed
from chaos.schedule import Fault, Schedule
from chaos.servers import MARK, Stage, kill_9

LIMIT_S = 1800.0
_OPTIM_STEP = "/api/v1/optim_step"


@dataclass(frozen=True, slots=True)
class Injected:
    """A fault that came to pass: how many seconds after the start of the run, and on which request."""

    fault: Fault
    at_s: float
    hit: str


@dataclass(slots=True)
class Played:
    """How a run went.

    Attributes:
        name: of the run.
        injected: the faults that came to pass, in the order of the schedule; others found the run finished.
        gave_up: what the command said where it ended by itself before the run was finished.
        num_starts: of the command.
        trouble: why it is not to be looked at further; empty for a run that finished.
    """

    name: str
    schedule: Schedule
    injected: list[Injected] = field(default_factory=list)
    gave_up: list[str] = field(default_factory=list)
    num_starts: int = 0
    seconds: float = 0.0
    trouble: str = ""


def run_folder(stage: Stage, name: str) -> Path:
    """Of a run's config, home, temporary files and output."""
    return stage.folder / "played" / name


def play(stage: Stage, schedule: Schedule, name: str) -> Played:
    """Play one run to its end; what was killed is up again when it returns."""
    player = _Player(stage, schedule, name)
    try:
        player.play()
    finally:
        kill_9(player.mark)
        for proxy in stage.proxies.values():
            proxy.disarm()
    stage.revive_all()
    return player.played


class _Player:
    def __init__(self, stage: Stage, schedule: Schedule, name: str) -> None:
        self.stage = stage
        self.played = Played(name, schedule)
        self.mark = f"{stage.mark}flow:{name}"
        self._folder = run_folder(stage, name)
        self._config = self._folder / "config.yaml"
        (self._folder / "tmp").mkdir(parents=True)
        self._config.write_text(yaml.safe_dump(config_of(stage, schedule, name)))
        self._waiting = list(schedule.faults)
        self._due_at: dict[Fault, float] = {}
        self._armed: list[Armed] = []
        self._before = self._updates()
        self._flow: subprocess.Popen[bytes] | None = None
        self._start_at = self._started = time.monotonic()

    def play(self) -> None:
        while self._flow is None or self._flow.poll() != 0:
            self._start_or_watch_flow()
            self.stage.revive()
            for fault in tuple(self._waiting):
                if self._is_due(fault) and self._inject(fault):
                    self._waiting.remove(fault)
            if self._is_hopeless():
                break
            time.sleep(0.02)
        self.played.seconds = time.monotonic() - self._started
        hits = [Injected(each.fault, each.hit_at - self._started, each.hit) for each in self._armed if each.hit]
        self.played.injected = sorted(self.played.injected + hits, key=lambda each: each.at_s)

    def _start_or_watch_flow(self) -> None:
        if self._flow is None and time.monotonic() >= self._start_at:
            self._flow = self._start_flow()
        elif self._flow and self._flow.poll() not in (None, 0):
            self.played.gave_up.append(self._last_line())
            self._flow, self._start_at = None, time.monotonic() + 1

    def _start_flow(self) -> subprocess.Popen[bytes]:
        self.played.num_starts += 1
        with (self._folder / "output.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", flow_of(self.played.schedule.kind), "--config", str(self._config)],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | _environment(self.stage, self._folder) | {MARK: self.mark},
                start_new_session=True,
            )

    def _updates(self) -> int:
        return self.stage.proxies["engine"].num_requests[_OPTIM_STEP]

    def _is_due(self, fault: Fault) -> bool:
        if self._updates() - self._before < fault.updates:
            return False
        return time.monotonic() >= self._due_at.setdefault(fault, time.monotonic() + fault.after_s)

    def _inject(self, fault: Fault) -> bool:
        """False where there is nothing to kill at the moment."""
        if fault.action != "kill":
            self._armed.append(self.stage.proxies[fault.target].arm(fault))
            return True
        if fault.target == "flow":
            if self._flow is None or self._flow.poll() is not None:
                return False
            kill_9(self.mark)
            self._flow.wait()
            self._flow, self._start_at = None, time.monotonic() + fault.seconds
        elif self.stage.servers[fault.target].is_up():
            self.stage.servers[fault.target].kill(fault.seconds)
        else:
            return False
        self.played.injected.append(Injected(fault, time.monotonic() - self._started, ""))
        return True

    def _is_hopeless(self) -> bool:
        if self.played.num_starts > 10 + len(self.played.schedule.faults):
            self.played.trouble = f"it was started {self.played.num_starts} times and did not finish"
        elif time.monotonic() - self._started > LIMIT_S:
            self.played.trouble = (
                f"it did not finish within {LIMIT_S:.0f} s; its stacks are in {self._folder}/output.log"
            )
            if self._flow and self._flow.poll() is None:
                self._flow.send_signal(signal.SIGABRT)  # faulthandler writes every thread's stack
                self._flow.wait(20)
        return bool(self.played.trouble)

    def _last_line(self) -> str:
        lines = (self._folder / "output.log").read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "nothing"


def _environment(stage: Stage, folder: Path) -> dict[str, str]:
    return {
        "TINKER_FLOWS_HOME": str(folder / "home"),
        "PREFECT_HOME": str(folder / "prefect"),
        "PREFECT_API_URL": stage.url("prefect") + "/api",
        "TINKER_API_KEY": "tml-chaos",
        "AWS_ENDPOINT_URL_S3": stage.url("s3"),
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_DEFAULT_REGION": "us-east-1",
        "TMPDIR": str(folder / "tmp"),
        "PYTHONFAULTHANDLER": "1",
    }
