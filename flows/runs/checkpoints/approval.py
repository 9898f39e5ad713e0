"""Decision of a person about a checkpoint: in the form of a suspended flow run, or in the terminal.

The decision about a training run is recorded in its directory, so that each question is asked once.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Literal

from prefect.context import FlowRunContext
from prefect.flow_runs import suspend_flow_run
from prefect.input import RunInput
from prefect.runtime import flow_run
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
class Question:
    """Question to a person about a checkpoint.

    Attributes:
        key: Name of the question within its flow run, in lower-case letters, digits and dashes.
        text: The question.
        table: What the decision is based on, as a Markdown table.
        lines: The same as lines of plain text.
    """

    key: str
    text: str
    table: str
    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a person: `approve` or `refuse`, and the reason, which may be empty."""

    decision: str
    reason: str

    def describe(self) -> str:
        """Return the decision and its reason.

        >>> Answer("refuse", "too long").describe()
        'refuse: too long'
        """
        return f"{self.decision}: {self.reason}" if self.reason else self.decision

    def describe_refusal(self) -> str:
        """Return the reason not to promote a checkpoint that was refused.

        >>> Answer("refuse", "too long").describe_refusal()
        'a person refused it (too long)'
        """
        return "a person refused it" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """Question to a person about the checkpoint of a training run.

    Attributes:
        step: Number of steps whose updates the checkpoint's weights contain.
        state_path: Path of the weights.
        rows: Held-out metrics before training and at the checkpoint.
    """

    run_name: str
    step: int
    state_path: str
    question: str
    rows: tuple[HeldOutRow, ...]

    def as_question(self) -> Question:
        """Return the question with the held-out metrics."""
        key = f"approval-{self.step}-" + re.sub(r"[^a-z0-9]+", "-", self.run_name.lower())
        if not self.rows:
            nothing = "The run has no held-out metrics."
            return Question(key, self.question, nothing, [nothing])
        lines = [row.describe_change() for row in self.rows]
        return Question(key, self.question, markdown_table(*held_out_table(self.rows)), lines)


@dataclass(frozen=True, slots=True)
class Approval(Answer):
    """Recorded answer to an `ApprovalRequest`.

    Attributes:
        flow_run_id: Flow run in which the person decided.
    """

    step: int
    state_path: str
    question: str
    flow_run_id: str


def read_approval(directory: RunDirectory, request: ApprovalRequest) -> Approval | None:
    """Return the recorded decision on a request; None if there is none, or if it was about another question."""
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
    answer = ask(request.as_question())
    if answer is None:
        return None
    subject = {"step": request.step, "state_path": request.state_path, "question": request.question}
    approval = Approval(**asdict(answer), **subject, flow_run_id=flow_run.get_id() or "")
    with directory:
        directory.write_bytes(APPROVAL, json.dumps(asdict(approval)).encode())
    return approval


def ask(question: Question) -> Answer | None:
    """Return the answer of a person to a question of the current flow run.

    None means that there is nobody to ask, or that the person answered `later`. Once a person has answered in the UI,
    Prefect runs the flow again from its beginning, and this call returns the answer.

    Raises:
        Pause: The flow run is suspended until a person decides in the Prefect UI.
    """
    context = FlowRunContext.get()
    assert context is not None
    assert context.flow_run is not None
    # Prefect does not suspend flow runs that another flow run has started.
    if context.flow_run.deployment_id and not context.flow_run.parent_task_run_id:
        form = ApprovalForm.with_initial_data(description=f"{escape_markdown(question.text)}\n\n{question.table}")
        answer = suspend_flow_run(wait_for_input=form, key=question.key)
        assert answer is not None
        return Answer(answer.decision, answer.reason)
    if not sys.stdin.isatty():
        return None
    decision = _ask_in_terminal(question)
    return None if decision == "later" else Answer(decision, "")


def _ask_in_terminal(question: Question) -> str:
    """Ask in the terminal; return `approve`, `refuse` or `later`."""
    print_notice("\n".join([*question.lines, question.text]))
    while True:
        try:
            answer = input("What do you want to do? [approve, refuse, later]: ").strip()
        except EOFError:
            return "later"
        if answer in ("approve", "refuse", "later"):
            return answer
