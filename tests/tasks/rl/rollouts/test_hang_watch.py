from __future__ import annotations

import logging
from threading import Event
from time import monotonic

import pytest

from tasks.rl.health import HealthLimits
from tasks.rl.rollouts.group_progress import GroupProgress
from tasks.rl.rollouts.hang_watch import HangWatch
from tasks.training.batch_source import MetricWarning, SampledTokens

LIMITS = HealthLimits(hang_seconds=60, hang_factor=3)


def closed_watch(timeout_s: float | None = None) -> HangWatch:
    """Return a watch whose thread has ended, so that only the test checks."""
    watch = HangWatch(LIMITS, timeout_s, lambda _: None)
    watch.close()
    return watch


def finish_group(watch: HangWatch) -> None:
    """Run a group that takes almost no time, so that `hang_seconds` is the bound of later groups."""
    with watch.watching("quick", 0, GroupProgress()):
        pass


@pytest.mark.parametrize(
    ("has_finished", "timeout_s", "bound"), [(False, None, 180), (True, None, 60), (True, 40, 100)]
)
def test_silence_beyond_the_bound_warns_once_per_step(has_finished: bool, timeout_s: float | None, bound: int) -> None:
    watch = closed_watch(timeout_s)
    if has_finished:
        finish_group(watch)
    began = monotonic()
    with (
        watch.watching("first", 1, GroupProgress()),
        watch.watching("second", 1, GroupProgress()),
        watch.watching("later", 2, GroupProgress()),
    ):
        assert watch._check(began + bound) == []
        warnings = watch._check(monotonic() + bound + 1)
        assert [(warning.check, warning.step) for warning in warnings] == [("hang", 1), ("hang", 2)]
        assert "of first, second has not responded" in warnings[0].text
        assert watch._check(monotonic() + 10 * bound) == []


def test_an_open_request_never_hangs_and_its_end_starts_a_new_silence() -> None:
    watch = closed_watch()
    finish_group(watch)
    progress, began = GroupProgress(), monotonic()
    with watch.watching("group", 1, progress):
        progress.start_request(2, 10, 5)
        assert watch._check(began + 1000) == []
        assert watch._check(began + 2000) == []
        progress.end_request(2, 10, 5, SampledTokens(20, 10))
        assert watch._check(began + 3000) == []
        assert watch._check(began + 3060) == []
        assert len(watch._check(began + 4000)) == 1  # far beyond the bound, which a pause of this process extends


def test_a_report_that_fails_does_not_end_the_watch(caplog: pytest.LogCaptureFixture) -> None:
    reported = [Event(), Event()]

    def report(warning: MetricWarning) -> None:
        reported[warning.step].set()
        raise RuntimeError("the tracking server is gone")

    watch = HangWatch(HealthLimits(hang_seconds=0.01, hang_factor=1.5), None, report)
    with caplog.at_level(logging.ERROR):
        for step, event in enumerate(reported):
            with watch.watching("group", step, GroupProgress()):
                assert event.wait(60)
        watch.close()
    assert caplog.text.count("RuntimeError: the tracking server is gone") == 2
