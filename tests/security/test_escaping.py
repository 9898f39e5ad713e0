"""Texts of data, models and names are shown, and have no effect, in pages, Markdown, the terminal and logs."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from forked_program import start_program
from markdown_it import MarkdownIt
from mlflow import MlflowClient
from mlflow.entities import Param, Run, RunData, RunInfo, RunStatus, RunTag
from mlflow_store import new_store
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.logging.handlers import APILogWorker
from rich.table import Table
from tinker import types
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import RolloutError, Trajectory, TrajectoryGroup, Transition

from blocks.storage import RunDirectory, RunStorage
from blocks.terminal import TextConsole, escape_terminal
from deployments.command_line import main
from engine.tiny import byte_tokenizer
from flows.sweep import show_sweep
from flows.sweeps.result import SweepResult
from tasks.common.task import step_task
from tasks.reports.comparison import ReportedRun, comparison_page
from tasks.reports.evaluation_page import evaluation_page
from tasks.reports.first_batch import WeightedDatum, first_batch_page
from tasks.reports.html import escape_markdown, html_page, markdown_code, markdown_table
from tasks.reports.run_report import ReportExtras, report_markdown, write_report
from tasks.reports.summary import RunSummary
from tasks.rl.rollouts.group_rollout import Group
from tasks.rl.transcripts.rollout_log import Transcript
from tasks.rl.transcripts.rollout_page import transcript_page
from tasks.sweeps.report import SweepSummary, _body
from tasks.sweeps.store import Point, Trial, Trials
from tasks.sweeps.table import point_rows
from tasks.training.examples import Example, append_examples
from tasks.training.tracking.metrics import MetricsLog

HOSTILE = [
    "<script>alert(1)</script>",
    '<img src=x onerror="alert(1)">',
    "[click](javascript:alert(1))",
    "![x](https://example.com/track.png)",
    "one\n\n# two\n| a | b |\n| --- | --- |",
    "`code` **bold** _it_ ~~gone~~ \\| | pipe",
    "<https://example.com> and &lt;b&gt;",
    "\x1b[2J\x1b]0;title\x07\r\x9b31m \u202eevil",
]
MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"])


def kinds(source: str) -> set[str]:
    """Kinds of the elements that a Markdown reader makes of a text."""
    tokens = MARKDOWN.parse(source)
    return {token.type for token in [*tokens, *(child for token in tokens for child in token.children or ())]}


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_shows_a_text_and_makes_nothing_of_it(text: str) -> None:
    plain = {"paragraph_open", "paragraph_close", "inline", "text", "text_special"}
    assert kinds(f"Run {escape_markdown(text)}") <= plain
    tokens = MARKDOWN.parse(f"Run {escape_markdown(text)}")
    shown = "".join(child.content for token in tokens for child in token.children or ())
    assert shown == f"Run {escape_terminal(' '.join(text.split()))}"
    assert kinds(f"Run {markdown_code(text)}") <= plain | {"code_inline"}
    cells = {"thead", "tbody", "table", "tr", "th", "td"}
    table = {f"{cell}_{side}" for cell in cells for side in ("open", "close")}
    source = markdown_table((text, "b"), [(text, "c"), ("d", text)])
    assert kinds(source) <= plain | table
    assert len(source.splitlines()) == 4


def test_the_artifact_of_a_run_shows_its_texts() -> None:
    facts = tuple((text, text) for text in HOSTILE)
    summary = RunSummary(HOSTILE[0], facts, (), (), tuple(HOSTILE), {}, "", tuple((text, text) for text in HOSTILE))
    markdown = report_markdown(summary, {}, ReportExtras(HOSTILE[2]))
    elements = {"html_block", "html_inline", "link_open", "image", "heading_open", "em_open", "s_open"}
    assert not kinds(markdown) & elements


def printed(*parts: Any) -> str:
    file = io.StringIO()
    TextConsole(file=file, width=400).print(*parts)
    return file.getvalue()


@pytest.mark.parametrize("text", [*HOSTILE, "[INST] hi [/INST]", "[red]a[/red]", ":smile:", "[/]"])
def test_the_terminal_shows_a_text_as_it_is(text: str) -> None:
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    for output in (printed(text), printed(table)):
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", output)
        assert all(line in output for line in escape_terminal(text).splitlines())


def test_a_sweep_over_texts_with_brackets_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = "[INST] hi [/INST]"
    fields: dict[str, Any] = dict.fromkeys(SweepResult.__dataclass_fields__, "")
    fields |= {"run_name": text, "columns": ("point", text), "rows": [("0", text)], "num_points": 1}
    show_sweep(SweepResult(**fields))
    assert capsys.readouterr().out.count(text) >= 3


ESCAPE = "\x1b[31mX\u202e\x9b"
COMMAND = ("-m", "deployments.command_line")


def output_of(home: Path, *command: str, **variables: str) -> str:
    """Standard output and standard error of a command of this project."""
    environment = os.environ | {"TINKER_FLOWS_HOME": str(home), "PYTHONPATH": str(Path.cwd()), **variables}
    if command[0] == "-m":
        program = start_program(command, environment, home / "output.log", home)
        program.wait(240)
        return program.output()
    run = subprocess.run([sys.executable, *command], env=environment, cwd=home, capture_output=True, text=True)
    return run.stdout + run.stderr


SCRIPT = """
from pathlib import Path
import tinker_flows
from flows.config.loader import load_config
load_config(tinker_flows.SftConfig, Path({path!r}), [])
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("command", "traceback"),
    [
        (("-m", "flows.sft", "--config", f"{ESCAPE}.yaml"), "0"),
        (("-m", "flows.sft", "--config", f"{ESCAPE}.yaml"), "1"),
        (("-m", "flows.sft", f"--{ESCAPE}"), "0"),
        ((*COMMAND, "run", "sft", f"{ESCAPE}=1"), "0"),
        ((*COMMAND, "status", f"{ESCAPE}"), "1"),
        (("-c", SCRIPT.format(path=ESCAPE)), "0"),
    ],
    ids=["config", "traceback", "option", "override", "status", "script"],
)
def test_errors_of_commands_escape_their_arguments(tmp_path: Path, command: tuple[str, ...], traceback: str) -> None:
    output = output_of(tmp_path, *command, TINKER_FLOWS_TRACEBACK=traceback, PREFECT_API_URL="http://127.0.0.1:1/api")
    assert "\\x1b[31mX" in output
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", output)


def test_status_escapes_what_a_run_has_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TINKER_FLOWS_HOME", str(tmp_path))
    with RunStorage(url=str(tmp_path / "runs")).run_directory("mine") as directory:
        config = {"run_name": "mine", "model": ESCAPE, "tracking": f"sqlite:///{tmp_path}/mlflow.db"}
        directory.write_bytes("config.json", json.dumps(config).encode())
    for arguments in (("status", "mine"), ("status",), ("status", "mine", "--json")):
        with pytest.raises(SystemExit):
            main([*arguments])
        output = "".join(capsys.readouterr())
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", output)
        assert "mine" in output
        assert ("1b[31mX" in output) == (arguments[1:] != ())


def is_raw(call: ast.Call) -> bool:
    """Return whether a call writes a text to standard error that the helper has not escaped."""
    name = ast.unparse(call.func)
    if name == "print":
        return any(ast.unparse(keyword.value) == "sys.stderr" for keyword in call.keywords)
    if name == "tqdm.write":
        return not ast.unparse(call.args[0]).startswith(("escape_terminal(", "line"))
    return name == "traceback.print_exc" or (
        name == "sys.exit" and bool(call.args) and isinstance(call.args[0], ast.JoinedStr)
    )


def test_texts_reach_standard_error_through_the_helper() -> None:
    """Two processes that import nothing are exceptions: the child of the sandbox and the supervisor of servers."""
    places = [
        f"{path}:{node.lineno}"
        for package in ("blocks", "deployments", "flows", "tasks", "tinker_flows")
        for path in Path(package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and is_raw(node) and path.name not in ("terminal.py", "child.py", "supervise.py")
    ]
    assert places == []


TEXT = (
    "".join(HOSTILE[:2]) + "</script></pre></td></title></style>\"' onclick=alert(1) <a href=javascript:alert(1)>x</a>"
)
TOKENS = list(TEXT.encode())
TOKENIZER: Any = byte_tokenizer()
FIELDS = ("value", "weight", "contribution", "grad_share", "grad_norm_weighted", "cosine_to_base")
HISTORY = {
    **{f"term/{TEXT}/{field}": [(0, 1.0), (1, 2.0)] for field in FIELDS},
    f"test/{TEXT}": [(0, 1.0), (1, 2.0)],
    "term/base/grad_norm_weighted": [(0, 1.0), (1, 1.0)],
}


def stored_run(folder: Path) -> tuple[RunDirectory, MlflowClient, str]:
    client = MlflowClient(new_store(folder))
    experiment = client.create_experiment("x", artifact_location=str(folder / "artifacts"))
    run_id = client.create_run(experiment, tags={"prefect.flow_name": TEXT, "tinker_flows.warning.x": TEXT}).info.run_id
    client.log_param(run_id, "model", TEXT)
    with RunStorage(url=str(folder / "runs")).run_directory("mine") as directory:
        append_examples(directory, 1, [Example(TEXT, TEXT)])
        record = {"name": "1", "batch": 1, "epoch": 0, "final": True, "state_path": TEXT}
        directory.append_line("checkpoints.jsonl", json.dumps(record))
    return directory, client, run_id


def pages(folder: Path) -> dict[str, str]:
    """Every kind of page, with the hostile text wherever data, models and users have a say."""
    directory, client, run_id = stored_run(folder)
    report = Path(write_report.fn(directory, MetricsLog(client, run_id), TEXT, HISTORY, ReportExtras(TEXT))).read_text()
    info = RunInfo("id", "1", "user", RunStatus.to_string(RunStatus.FINISHED), 0, 1, "active")
    tags = [RunTag("tinker_flows.warning.x", TEXT)]
    runs = [
        ReportedRun(TEXT, Run(info, RunData(params=[Param(TEXT, value)], tags=tags)), directory, HISTORY)
        for value in (TEXT, "other")
    ]
    turn = Transition(
        types.ModelInput.from_ints(TOKENS), TokensWithLogprobs(TOKENS, [-1.0] * len(TOKENS)), 1.0, True, {TEXT: 1}
    )
    trajectory = Trajectory([turn], types.ModelInput.empty())
    groups = [
        Group((TEXT,), TrajectoryGroup([trajectory], [1.0], [{TEXT: 1.0}]), ()),
        Group((TEXT,), None, (RolloutError(TEXT, TEXT),)),
    ]
    trial = Trial(0, 0, TEXT, "completed", value=1.0, metrics={TEXT: 1.0})
    trials = Trials((Point(0, {TEXT: TEXT}), Point(1, {TEXT: "other"})), {(0, 0): trial})
    summary = SweepSummary(TEXT, TEXT, "min", trials, point_rows(trials, [0], TEXT, "min"), {}, [], TEXT)
    return {
        "report": report,
        "comparison": comparison_page(runs[0], runs[1]),
        "first batch": first_batch_page(TEXT, [WeightedDatum(TEXT, TOKENS, [1.0] * len(TOKENS))], TOKENIZER),
        "transcript": transcript_page(TOKENIZER, 0, Transcript(groups, {TEXT: 1.0}, {(0, 0): {TEXT: 1.0}})),
        "sweep": html_page(summary.run_name, _body(summary, [], {})),
        "evaluation": evaluation_page(TEXT, {1: {TEXT: 1.0}, 2: {TEXT: 2.0}}, {}, {TEXT: 1.5}),
    }


@flow(name="escaping")
def failing_flow() -> str:
    for text in HOSTILE:
        get_run_logger().warning("%s", text)
        get_run_logger().warning(text.replace("%", "%%"))

    @step_task
    def fail() -> None:
        get_run_logger().error("%s", HOSTILE[-1])
        raise ValueError(HOSTILE[-1])

    fail.submit().wait()
    return str(FlowRunContext.get().flow_run.id)  # pyright: ignore[reportOptionalMemberAccess]


def test_prefect_logs_show_a_text_as_it_is(prefect_server: str) -> None:
    flow_run = UUID(failing_flow())
    APILogWorker.drain_all(at_exit=False)
    with get_client(sync_client=True) as client:
        by_flow = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run]))
        lines = [log.message for log in client.read_logs(by_flow, limit=200)]
    for text in HOSTILE:
        assert lines.count(escape_terminal(text)) >= 2
    assert any("ValueError: \\x1b[2J" in line for line in lines)
    assert not [line for line in lines if re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", line)]


class Elements(HTMLParser):
    """Images, handlers of events and links with code, and the text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.texts = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has_code = any(name.startswith("on") or (value or "").startswith("javascript:") for name, value in attrs)
        if tag == "img" or has_code:
            self.found.append(f"{tag} {attrs}")

    def handle_data(self, data: str) -> None:
        self.texts += data


def test_every_module_with_a_page_is_tested() -> None:
    modules = [
        str(path)
        for package in ("blocks", "deployments", "engine", "flows", "tasks")
        for path in Path(package).rglob("*.py")
        if re.search(r"(?<!def )\bhtml_page\(|<!doctype", path.read_text())
    ]
    assert sorted(modules) == [
        "tasks/reports/comparison.py",
        "tasks/reports/evaluation_page.py",
        "tasks/reports/first_batch.py",
        "tasks/reports/html.py",
        "tasks/reports/run_report.py",
        "tasks/rl/transcripts/rollout_page.py",
        "tasks/sweeps/report.py",
    ]


def test_no_page_makes_elements_of_texts(tmp_path: Path) -> None:
    for name, page in pages(tmp_path).items():
        elements = Elements()
        elements.feed(page)
        assert elements.found == [], name
        assert "<script>alert" not in page, name
        assert "<script>alert(1)</script>" in elements.texts, f"the page {name} does not show the text"
