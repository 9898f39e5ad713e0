"""Schedules of faults, drawn from a seed so that a run can be repeated."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

NUM_STEPS = 24

GROUPS = 2  # groups per RL step

# Supervised fine-tuning, the three modes of RL, supervised fine-tuning with steps of 2,000 points in MLflow, RL that
# refills its groups, and RL whose environment and judge are servers.
KINDS = ("sft", "sync", "stream", "async", "wide", "refill", "served")

SERVERS = ("engine", "prefect", "mlflow", "s3")
GRADERS = ("environment", "judge")  # servers of the kind `served`

# Lease of a run on S3 while the chaos test runs, so that a takeover does not take half a minute.
LEASE_S = 3.0

# Faults of the processes of a run, and of a server.
PROCESS_ACTIONS = {
    "kill": "kill -9 of the run, or of a server with all its processes",
    "freeze": "SIGSTOP, and SIGCONT after longer than the lease of a run on S3",
    "freeze and replace": "the same command starts again while the run is frozen",
    "start twice": "the run is killed, and its command starts twice at the same moment",
    "remove directory": "the directory or S3 prefix of the run is deleted while the run writes it",
    "set clock": "the clock of the run jumps by minutes, forwards or backwards",
}
KILLS = ("kill", "start twice")
_FLOW_ONLY = ("freeze and replace", "start twice", "remove directory", "set clock")

# Faults that a proxy can inject into one request, and their effect.
ACTIONS = {
    "drop request": "the connection is reset before the service receives the request",
    "drop response": "the service processes the request, but its response is lost",
    "cut response": "the connection closes after half of the response",
    "delay response": "the response arrives seconds late",
    "500": "the proxy responds with status 500; the service does not receive the request",
    "500 after": "the service processes the request, but the proxy responds with status 500",
    "429": "the proxy responds with status 429; the service does not receive the request",
    "garbage": "the service processes the request, but the proxy responds with status 200 and an unrelated page",
    "noise": "the service processes the request, but the response is not HTTP",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        updates: number of requested optimizer steps, including repeated ones, after which the fault is due.
        after_s: additional delay in seconds.
        target: `flow`, or one of `SERVERS` or `GRADERS`.
        action: one of `PROCESS_ACTIONS` or of `ACTIONS`.
        skip: number of requests to pass through before a request fault.
        seconds: downtime after a kill, duration of a freeze, jump of the clock, or delay of a response.
        samples: number of sampling requests from one snapshot of the weights after which the fault is due.
    """

    updates: int
    after_s: float
    target: str
    action: str
    skip: int
    seconds: float
    samples: int = 0

    def __str__(self) -> str:
        event = f"{'kill -9' if self.action == 'kill' else self.action} of {self.target}"
        return f"{event} {self.after_s:.2f} s after update {self.updates}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Faults, kind and storage of one run.

    Attributes:
        number: number of the run; together with the seed it determines the schedule.
        kind: one of `KINDS`.
        storage: `local` or `s3`.
    """

    number: int
    kind: str
    storage: str
    faults: tuple[Fault, ...]


def draw_schedule(seed: int, number: int, num_faults: int) -> Schedule:
    """Draw the schedule of a run. Runs cycle through the kinds; every second run of a kind uses S3."""
    generator = random.Random(f"{seed}/{number}")
    cycle, position = divmod(number, len(KINDS))
    storage = "s3" if (cycle + position) % 2 else "local"
    kind = KINDS[position]
    targets = ("flow", *(SERVERS if storage == "s3" else SERVERS[:-1]), *(3 * GRADERS if kind == "served" else ()))
    faults = [_draw_fault(generator, targets) for _ in range(num_faults)]
    if kind == "refill":
        # Half of the faults hit a step that has sampled its groups and refills them.
        faults[::2] = [replace(fault, after_s=fault.after_s / 10, samples=GROUPS + 1) for fault in faults[::2]]
    faults.sort(key=lambda fault: (fault.updates, fault.after_s))
    return Schedule(number, kind, storage, tuple(faults))


def _draw_fault(generator: random.Random, targets: tuple[str, ...]) -> Fault:
    phase = generator.random()
    if phase < 0.15:  # while the run opens
        updates, after_s = 0, generator.uniform(0, 10)
    elif phase < 0.25:  # during the final save, evaluation and report
        updates, after_s = NUM_STEPS, generator.uniform(0, 2)
    else:
        updates, after_s = generator.randrange(1, NUM_STEPS), generator.uniform(0, 0.6)
    target = generator.choice(targets)
    if target == "flow":
        action = "kill" if generator.random() < 0.4 else generator.choice(list(PROCESS_ACTIONS))
    elif generator.random() < 0.4:
        action = generator.choice([action for action in PROCESS_ACTIONS if action not in _FLOW_ONLY])
    else:
        action = generator.choice(list(ACTIONS))
    seconds = _draw_seconds(generator, action)
    return Fault(updates, round(after_s, 3), target, action, generator.randrange(6), round(seconds, 2))


def _draw_seconds(generator: random.Random, action: str) -> float:
    if action in (*KILLS, "remove directory"):
        return generator.uniform(0.2, 3)
    if action == "freeze":
        return generator.uniform(LEASE_S + 1, LEASE_S + 4)
    if action == "freeze and replace":
        return generator.uniform(2 * LEASE_S, 3 * LEASE_S)
    if action == "set clock":
        return generator.choice((-1, 1)) * generator.uniform(60, 600)
    return generator.uniform(2, 8)
