"""A run played and held to the undisturbed one."""

from __future__ import annotations

from dataclasses import dataclass

from chaos.checks import Left, differences, leftovers, look_at
from chaos.play import Played, play
from chaos.schedule import Schedule
from chaos.servers import Stage


@dataclass(frozen=True, slots=True)
class Judged:
    """A run and what is wrong with what it left; nothing, if it survived."""

    played: Played
    problems: tuple[str, ...]


def judge(stage: Stage, schedule: Schedule, whole: Left) -> Judged:
    """Play a run and hold it to the undisturbed one of its kind."""
    played = play(stage, schedule, f"run-{schedule.number}")
    if played.trouble:
        return Judged(played, (played.trouble,))
    try:
        left = look_at(stage, played)
    except (AssertionError, ValueError, LookupError, OSError) as error:
        return Judged(played, (f"what it left cannot be read: {error!r}",))
    return Judged(played, (*differences(schedule.kind, left, whole), *leftovers(stage, played)))


def undisturbed(stage: Stage, kind: str) -> Left:
    """What a run of a kind leaves that nothing befalls."""
    played = play(stage, Schedule(-1, kind, "local", ()), f"whole-{kind}")
    assert not played.trouble, (played.trouble, played.gave_up[-1:])
    assert not played.gave_up, played.gave_up
    left = look_at(stage, played)
    problems = [*differences(kind, left, left), *leftovers(stage, played)]
    assert not problems, problems
    return left
