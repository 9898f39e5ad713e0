"""What was played, to be read: the terms of each answer, the page, the traces in a real MLflow server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient
from mlflow_process import running_mlflow
from tinker import types
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.types import RolloutError, Trajectory, TrajectoryGroup, Transition

from engine.tiny import byte_tokenizer
from tasks.advantages import Shape
from tasks.metrics import MetricsLog
from tasks.rollout import Group
from tasks.source import Trained
from tasks.traces import write_traces
from tasks.trajectories import pack_groups
from tasks.transcript import Transcript, make_transcript
from tasks.transcript_page import transcript_page

TOKENIZER: Any = byte_tokenizer()
METRICS = {"term/kl/value": 0.25, "term/base/value": 9.0, "term/kl/weight": 0.5, "loss/total": 3.0}


def answer(*turns: str) -> Trajectory:
    empty = types.ModelInput.empty()
    transitions = [
        Transition(
            ob=types.ModelInput.from_ints(list(f"{number}. Say <b>:".encode())),
            ac=TokensWithLogprobs(list(said.encode()), [-0.5] * len(said)),
            reward=0.5,
            episode_done=number == len(turns) - 1,
            metrics={"length": len(said)},
        )
        for number, said in enumerate(turns)
    ]
    return Trajectory(transitions, empty)


def group(tag: str, *members: Trajectory) -> Group:
    rewards = [float(index) for index in range(len(members))]
    return Group((tag,), TrajectoryGroup(list(members), rewards, [{} for _ in members]), ())


LOST = Group(("lost",), None, (RolloutError("ValueError", "no such game"),))


def make() -> Transcript:
    """Two minibatches: one with a group that was lost, one with a group of which a member has two turns."""
    parts = [[LOST, group("one", answer("ab"), answer("abc"))], [group("two", answer("a"), answer("bb", "cccc"))]]
    batches = [pack_groups(each, Shape(), TOKENIZER) for each in parts]
    trained = [Trained(each, torch.zeros(0), {"kl": torch.arange(float(each.num_datums))}) for each in batches]
    return make_transcript(parts, trained, METRICS)


def test_each_answer_has_what_the_terms_say_of_it() -> None:
    transcript = make()
    assert [each.tags for each in transcript.groups] == [("lost",), ("one",), ("two",)]
    assert transcript.values == {"kl": 0.25}
    # The turns of the last are two datums, of 1 and 2.
    assert transcript.scores == {(1, 0): {"kl": 0}, (1, 1): {"kl": 1}, (2, 0): {"kl": 0}, (2, 1): {"kl": 1.5}}
    page = transcript_page(TOKENIZER, 7, transcript)
    assert "kl 0.25" in page
    assert "<h3>Answer 1: reward 2</h3><p>kl 1.5</p>" in page
    assert "ValueError: no such game" in page
    assert "Say &lt;b&gt;:" in page


@pytest.mark.slow
def test_traces_are_in_the_server_and_the_experiment_of_the_run(tmp_path: Path) -> None:
    with running_mlflow(tmp_path) as url:
        client = MlflowClient(url)
        experiment = client.create_experiment("theirs")
        run = client.create_run(experiment)
        for _ in range(2):  # as a run does that was killed in between
            write_traces.fn(MetricsLog(client, run.info.run_id), TOKENIZER, 7, make())
        found = client.search_traces(locations=[experiment], run_id=run.info.run_id)
        assert sorted(each.info.tags["mlflow.traceName"] for each in found) == [f"step 7, group {n}" for n in range(3)]
        (two,) = (each for each in found if each.info.tags["tags"] == "two")
        names = ["group", "answer 0", "answer 0, turn 0", "answer 1", "answer 1, turn 0", "answer 1, turn 1"]
        assert sorted(span.name for span in two.data.spans) == sorted(names)
        spans = {span.name: span for span in two.data.spans}
        assert spans["answer 1"].parent_id == spans["group"].span_id
        assert spans["answer 1, turn 1"].parent_id == spans["answer 1"].span_id
        assert spans["answer 1"].outputs == {"reward": 2.0, "terms": {"kl": 1.5}}
        assert spans["answer 1, turn 1"].inputs == {"prompt": "1. Say <b>:"}
        assert spans["answer 1, turn 1"].outputs == {"text": "cccc", "reward": 0.5, "metrics": {"length": 4}}
        (lost,) = (each for each in found if each.info.tags["tags"] == "lost")
        assert lost.info.state == "ERROR"
        assert lost.data.spans[0].outputs["errors"] == ["ValueError: no such game"]
