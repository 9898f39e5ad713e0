"""What is done to a run, and when: drawn from a seed, so that it can be played again."""

from __future__ import annotations

import random
from dataclasses import dataclass

NUM_STEPS = 24

KINDS = ("sft", "sync", "stream", "async")  # supervised, and the modes of rl

SERVERS = ("engine", "prefect", "mlflow", "s3")

# What a proxy can do to one request, and what the service has done by then.
ACTIONS = {
    "drop request": "the connection is reset, the service never saw the request",
    "drop answer": "the service did what was asked, its answer is lost",
    "cut answer": "half of the answer, then the end of the connection",
    "delay answer": "the answer comes seconds later",
    "500": "refused with 500, the service never saw the request",
    "500 after": "the service did what was asked, the answer is a 500 from the way",
    "429": "refused with 429, the service never saw the request",
    "garbage": "the service did what was asked, the answer is a 200 with a page that is not its own",
    "noise": "the service did what was asked, the answer is no HTTP",
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        updates: due when the run has asked for so many optimizer steps, those that it repeats counted too.
        after_s: and so many seconds later.
        target: what it befalls: `flow`, or one of `SERVERS`.
        action: `kill` (with -9), or one of `ACTIONS`.
        skip: for a request: so many are let through before.
        seconds: how long what was killed stays away, or an answer is held.
    """

    updates: int
    after_s: float
    target: str
    action: str
    skip: int
    seconds: float

    def __str__(self) -> str:
        what = f"kill -9 {self.target}" if self.action == "kill" else f"{self.action} of {self.target}"
        return f"{what} {self.after_s:.2f} s after update {self.updates}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The faults of one run, what it trains, and where it keeps its record.

    Attributes:
        number: of the run; with the seed it gives the schedule.
        kind: of `KINDS`.
        storage: `local` or `s3`.
    """

    number: int
    kind: str
    storage: str
    faults: tuple[Fault, ...]


def draw(seed: int, number: int, num_faults: int) -> Schedule:
    """The schedule of a run: of each kind in turn, and every second one of a kind on S3.

    >>> draw(0, 1, 2) == draw(0, 1, 2) != draw(1, 1, 2)
    True
    """
    chance = random.Random(f"{seed}/{number}")
    rounds, place = divmod(number, len(KINDS))
    storage = "s3" if (rounds + place) % 2 else "local"
    servers = SERVERS if storage == "s3" else SERVERS[:-1]
    faults = tuple(_draw_fault(chance, servers) for _ in range(num_faults))
    return Schedule(
        number, KINDS[place], storage, tuple(sorted(faults, key=lambda fault: (fault.updates, fault.after_s)))
    )


def _draw_fault(chance: random.Random, servers: tuple[str, ...]) -> Fault:
    where = chance.random()
    if where < 0.15:  # while the run is opened
        updates, after_s = 0, chance.uniform(0, 10)
    elif where < 0.25:  # the last save, the last evaluation, the report
        updates, after_s = NUM_STEPS, chance.uniform(0, 2)
    else:
        updates, after_s = chance.randrange(1, NUM_STEPS), chance.uniform(0, 0.6)
    target = chance.choice(("flow", *servers))
    action = "kill" if target == "flow" or chance.random() < 0.3 else chance.choice(list(ACTIONS))
    seconds = chance.uniform(0.2, 3) if action == "kill" else chance.uniform(2, 8)
    return Fault(updates, round(after_s, 3), target, action, chance.randrange(6), round(seconds, 2))
