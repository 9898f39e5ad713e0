"""Decision of a person about a checkpoint: in the form of a suspended flow run, or in the terminal.

The decision is recorded in the run's directory, so that each question is asked once.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Literal

from prefect.context import FlowRunContext
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from pydantic import Field

from blocks.storage import RunDirectory
from blocks.terminal import print_notice
from flows.config.base import RunConfig
from flows.runs.blocks import storage_of
from tasks.reports.html import escape_markdown, markdown_table
from tasks.reports.tables import HeldOutRow, held_out_table

APPROVAL = "approval.json"


class ApprovalForm(RunInput):
    """Form of a suspended flow run in the Prefect UI."""

    decision: Literal["approve", "refuse"] = Field(title="Decision", description="`refuse` ends the run.")
    reason: str = Field(default="", title="Reason", description="Recorded with the decision.")


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """Question to a person about the checkpoint of a run.

    Attributes:
        step: Number of updates in the checkpoint's weights.
        state_path: Path of the weights.
        rows: Held-out metrics before training and at the checkpoint.
    """

    run_name: str
    step: int
    state_path: str
    question: str
    rows: tuple[HeldOutRow, ...]

    @property
    def key(self) -> str:
        """Name of the request within its flow run, in the characters that Prefect allows."""
        return f"approval-{self.step}-" + re.sub(r"[^a-z0-9]+", "-", self.run_name.lower())

    def as_markdown(self) -> str:
        """Return the question and a table of the metrics."""
        table = markdown_table(*held_out_table(self.rows)) if self.rows else "The run has no held-out metrics."
        return f"{escape_markdown(self.question)}\n\n{table}"

    def as_text(self) -> str:
        """Return a sentence about each metric, and the question."""
        return "\n".join([*(row.describe_change() for row in self.rows), self.question])


@dataclass(frozen=True, slots=True)
class Approval:
    """Recorded decision.

    Attributes:
        flow_run_id: Flow run in which the person decided.
    """

    step: int
    state_path: str
    question: str
    decision: str
    reason: str
    flow_run_id: str

    def describe(self) -> str:
        """Return the decision and its reason.

        >>> Approval(8, "tinker://a/weights/8", "Register it?", "refuse", "too long", "").describe()
        'refuse: too long'
        """
        return f"{self.decision}: {self.reason}" if self.reason else self.decision


def read_approval(directory: RunDirectory, request: ApprovalRequest) -> Approval | None:
    """Return the recorded decision on a request, or None."""
    content = directory.read_bytes(APPROVAL)
    if content is None:
        return None
    approval = Approval(**json.loads(content))
    subject_of = attrgetter("step", "state_path", "question")
    return approval if subject_of(approval) == subject_of(request) else None


def decide(request: ApprovalRequest, config: RunConfig) -> Approval | None:
    """Return the decision of a person on a request, and record it.

    None means that there is nobody to ask, or that the person answered `later`.

    Raises:
        Pause: The flow run is suspended until a person decides in the Prefect UI.
        StorageError: Another process is writing the run.
    """
    directory = storage_of(config).run_directory(request.run_name)
    if approval := read_approval(directory, request):
        return approval
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    # Prefect does not suspend flow runs that another flow run has started.
    if context.flow_run.deployment_id and not context.flow_run.parent_task_run_id:
        form = ApprovalForm.with_initial_data(description=request.as_markdown())
        answer = suspend_flow_run(wait_for_input=form, key=request.key)
        assert answer is not None
        decision, reason = answer.decision, answer.reason
    elif sys.stdin.isatty():
        decision, reason = _ask(request), ""
        if decision == "later":
            return None
    else:
        return None
    approval = Approval(request.step, request.state_path, request.question, decision, reason, str(context.flow_run.id))
    with directory:
        directory.write_bytes(APPROVAL, json.dumps(asdict(approval)).encode())
    return approval


def _ask(request: ApprovalRequest) -> str:
    """Ask in the terminal; return `approve`, `refuse` or `later`."""
    print_notice(request.as_text())
    while True:
        try:
            answer = input("What do you want to do? [approve, refuse, later]: ").strip()
        except EOFError:
            return "later"
        if answer in ("approve", "refuse", "later"):
            return answer
