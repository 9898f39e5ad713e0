"""What a sweep sees of a trial that runs elsewhere, and how it has it stop: through MLflow and Prefect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException
from prefect.states import Cancelling

from blocks.errors import ServiceError
from flows.sweeps.record import SweepLog

LOOK_EVERY_S = 2.0
# A Prefect server that is away or answers what is no server's.
PASSING = (httpx.HTTPError, PrefectException, RuntimeError, ValueError)


@dataclass(slots=True)
class Watched:
    """The curve of a trial, shown point by point to `watch`, which may return why to stop.

    Attributes:
        asked: why the trial is to stop, once `watch` has said so.
    """

    log: SweepLog
    run_name: str
    metric: str
    watch: Callable[[int, Mapping[str, float]], str]
    asked: str = ""
    _seen: set[int] = field(default_factory=set)

    def look(self) -> str:
        """Show the points that are new; `asked`."""
        with suppress(ServiceError):
            for step, value in self.log.curve(self.log.trial(self.run_name), self.metric):
                if step not in self._seen and not self.asked:
                    self.asked = self.watch(step, {self.metric: value})
                self._seen.add(step)
        return self.asked


def cancel(run_id: UUID) -> None:
    """Have a flow run end its step, save it and end."""
    with suppress(*PASSING), get_client(sync_client=True) as client:
        state = client.read_flow_run(run_id).state
        if state and not state.is_final() and not state.is_cancelling():
            client.set_flow_run_state(run_id, Cancelling())
