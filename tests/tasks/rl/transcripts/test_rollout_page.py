"""Transcript of a step: scores of each completion, HTML page, and traces on a real MLflow server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from mlflow.entities import Feedback, Trace
from mlflow_process import running_mlflow
from tinker import types
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import Metrics, RolloutError, Trajectory, TrajectoryGroup, Transition

from blocks.errors import LostRunError
from engine.tiny import byte_tokenizer
from tasks.rl.advantages import AdvantageSettings
from tasks.rl.rollouts.group_rollout import Group
from tasks.rl.trajectories import pack_groups
from tasks.rl.transcripts.mlflow_traces import write_traces
from tasks.rl.transcripts.rollout_log import Transcript, make_transcript
from tasks.rl.transcripts.rollout_page import transcript_page
from tasks.training.batch_source import TrainedBatch
from tasks.training.tracking.metrics import MetricsLog

TOKENIZER: Any = byte_tokenizer()
METRICS = {"term/kl/value": 0.25, "term/base/value": 9.0, "term/kl/weight": 0.5, "loss/total": 3.0}


def trajectory(*turns: str) -> Trajectory:
    empty = types.ModelInput.empty()
    transitions = [
        Transition(
            ob=types.ModelInput.from_ints(list(f"{number}. Say <b>:".encode())),
            ac=TokensWithLogprobs(list(text.encode()), [-0.5] * len(text)),
            reward=0.5,
            episode_done=number == len(turns) - 1,
            metrics={"length": len(text)},
        )
        for number, text in enumerate(turns)
    ]
    return Trajectory(transitions, empty)


def group(tag: str, *members: Trajectory) -> Group:
    rewards = [float(index) for index in range(len(members))]
    metrics: list[Metrics] = [
        {"judge/unparsed": 0.0} if tag == "one" else {"correct": index} for index in range(len(members))
    ]
    return Group((tag,), TrajectoryGroup(list(members), rewards, metrics), ())


LOST = Group(("lost",), None, (RolloutError("ValueError", "no such game"),))


def two_minibatches() -> Transcript:
    """Transcript of two minibatches: one with a failed group, one with a member of two turns."""
    parts = [
        [LOST, group("one", trajectory("ab"), trajectory("abc"))],
        [group("two", trajectory("a"), trajectory("bb", "cccc"))],
    ]
    batches = [pack_groups(part, AdvantageSettings(), TOKENIZER) for part in parts]
    trained = [TrainedBatch(batch, torch.zeros(0), {"kl": torch.arange(float(batch.num_datums))}) for batch in batches]
    return make_transcript(parts, trained, METRICS)


def test_each_completion_has_its_reward_and_term_scores() -> None:
    transcript = two_minibatches()
    assert [group.tags for group in transcript.groups] == [("lost",), ("one",), ("two",)]
    assert transcript.values == {"kl": 0.25}
    # The last member has two turns, hence two datums with the scores 1 and 2.
    assert transcript.scores == {(1, 0): {"kl": 0}, (1, 1): {"kl": 1}, (2, 0): {"kl": 0}, (2, 1): {"kl": 1.5}}
    page = transcript_page(TOKENIZER, 7, transcript)
    assert "kl 0.25" in page
    assert "<h3>Answer 1: reward 2</h3><p>kl 1.5</p>" in page
    assert "ValueError: no such game" in page
    assert "Say &lt;b&gt;:" in page


def assessments(trace: Trace, span_id: str) -> set[tuple[Any, ...]]:
    """Assessments of a span: name, value, and type and name of the source."""
    return {
        (feedback.name, feedback.value, feedback.source.source_type, feedback.source.source_id)
        for feedback in trace.info.assessments
        if isinstance(feedback, Feedback) and feedback.span_id == span_id
    }


def lose_run() -> None:
    raise LostRunError("The run is being written by another process.")


@pytest.mark.slow
def test_traces_are_written_once_to_the_experiment_of_the_run(tmp_path: Path) -> None:
    with running_mlflow(tmp_path) as url:
        client = MlflowClient(url)
        experiment = client.create_experiment("experiment")
        run = client.create_run(experiment)
        for _ in range(2):  # a run that was killed after the first write repeats it
            write_traces.fn(MetricsLog(client, run.info.run_id), TOKENIZER, 7, two_minibatches())
        traces = client.search_traces(locations=[experiment], run_id=run.info.run_id)
        assert sorted(trace.info.tags["mlflow.traceName"] for trace in traces) == [
            f"step 7, group {n}" for n in range(3)
        ]
        with pytest.raises(LostRunError):
            write_traces.fn(MetricsLog(client, run.info.run_id, lose_run), TOKENIZER, 7, two_minibatches())
        kept = client.search_traces(locations=[experiment], run_id=run.info.run_id)
        assert {trace.info.trace_id for trace in kept} == {trace.info.trace_id for trace in traces}
        (two,) = (trace for trace in traces if trace.info.tags["tags"] == "two")
        names = ["group", "answer 0", "answer 0, turn 0", "answer 1", "answer 1, turn 0", "answer 1, turn 1"]
        assert sorted(span.name for span in two.data.spans) == sorted(names)
        spans = {span.name: span for span in two.data.spans}
        assert spans["answer 1"].parent_id == spans["group"].span_id
        assert spans["answer 1, turn 1"].parent_id == spans["answer 1"].span_id
        assert spans["answer 1"].outputs == {"reward": 2.0, "terms": {"kl": 1.5}}
        assert spans["answer 1, turn 1"].inputs == {"prompt": "1. Say <b>:"}
        assert spans["answer 1, turn 1"].outputs == {"text": "cccc", "reward": 0.5, "metrics": {"length": 4}}
        (one,) = (trace for trace in traces if trace.info.tags["tags"] == "one")
        assert assessments(two, spans["answer 1"].span_id) == {
            ("reward", 2.0, "CODE", "environment"),
            ("correct", 1, "CODE", "environment"),
            ("term/kl", 1.5, "CODE", "term kl"),
        }
        judged = next(span for span in one.data.spans if span.name == "answer 1")
        assert assessments(one, judged.span_id) == {
            ("reward", 1.5, "LLM_JUDGE", "judge"),
            ("judge/unparsed", 0.0, "LLM_JUDGE", "judge"),
            ("term/kl", 1.0, "CODE", "term kl"),
        }
        (lost,) = (trace for trace in traces if trace.info.tags["tags"] == "lost")
        assert lost.info.assessments == []
        assert lost.info.state == "ERROR"
        assert lost.data.spans[0].outputs["errors"] == ["ValueError: no such game"]
