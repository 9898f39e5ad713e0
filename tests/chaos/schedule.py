"""Schedules of faults, drawn from a seed so that a run can be repeated."""

from __future__ import annotations

import random
from dataclasses import dataclass

NUM_STEPS = 24

KINDS = ("sft", "sync", "stream", "async")  # supervised fine-tuning and the three modes of RL

SERVERS = ("engine", "prefect", "mlflow", "s3")

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
        target: `flow`, or one of `SERVERS`.
        action: `kill` (kill -9), or one of `ACTIONS`.
        skip: number of requests to pass through before a request fault.
        seconds: downtime after a kill, or delay of a response.
    """

    updates: int
    after_s: float
    target: str
    action: str
    skip: int
    seconds: float

    def __str__(self) -> str:
        event = f"kill -9 {self.target}" if self.action == "kill" else f"{self.action} of {self.target}"
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
    servers = SERVERS if storage == "s3" else SERVERS[:-1]
    faults = sorted(
        (_draw_fault(generator, servers) for _ in range(num_faults)), key=lambda fault: (fault.updates, fault.after_s)
    )
    return Schedule(number, KINDS[position], storage, tuple(faults))


def _draw_fault(generator: random.Random, servers: tuple[str, ...]) -> Fault:
    phase = generator.random()
    if phase < 0.15:  # while the run opens
        updates, after_s = 0, generator.uniform(0, 10)
    elif phase < 0.25:  # during the final save, evaluation and report
        updates, after_s = NUM_STEPS, generator.uniform(0, 2)
    else:
        updates, after_s = generator.randrange(1, NUM_STEPS), generator.uniform(0, 0.6)
    target = generator.choice(("flow", *servers))
    action = "kill" if target == "flow" or generator.random() < 0.3 else generator.choice(list(ACTIONS))
    seconds = generator.uniform(0.2, 3) if action == "kill" else generator.uniform(2, 8)
    return Fault(updates, round(after_s, 3), target, action, generator.randrange(6), round(seconds, 2))
