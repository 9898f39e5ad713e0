"""Rollouts of a step as MLflow traces: one trace per group, with a span per member and per turn.

Rewards, metrics of the environment and scores of terms are assessments of the members.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlflow.entities import (
    Assessment,
    AssessmentSource,
    AssessmentSourceType,
    Feedback,
    Span,
    SpanType,
    TraceInfo,
    TraceLocation,
    TraceState,
)
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.mlflow_internals import SpanAttributeKey, TraceMetadataKey, TraceTagKey, TracingClient
from tasks.common.task import retried_task
from tasks.rl.transcripts.rollout_log import Transcript, prompt_text
from tasks.training.tracking.metrics import MetricsLog

_PREVIEW = 1000  # characters
_JUDGE_PREFIX = "judge/"  # of the metrics of prompted judges


@retried_task(name="traces", task_run_name="traces-{step}")
def write_traces(log: MetricsLog, tokenizer: Tokenizer, step: int, transcript: Transcript) -> None:
    """Write the traces of a step to the run's experiment; traces of the step from a killed run are replaced."""
    client = TracingClient(log.client.tracking_uri)  # the process's own tracking URI may differ
    experiment = log.client.get_run(log.run_id).info.experiment_id
    traces = [_Trace(log.run_id, step, number) for number in range(len(transcript.groups))]
    log.check_writer()
    client.delete_traces(experiment, trace_ids=[trace.trace_id for trace in traces])
    spans: list[Span] = []
    for trace in traces:
        trace_spans = list(_spans(trace, tokenizer, transcript))
        client.start_trace(trace.info(experiment, transcript, trace_spans))
        spans += trace_spans
    client.log_spans(experiment, spans)


@dataclass(frozen=True, slots=True)
class _Trace:
    """Trace of a group; its IDs follow from the run, step and group, so writing it again replaces it."""

    run_id: str
    step: int
    number: int

    @property
    def trace_id(self) -> str:
        return f"tr-{self._digest()[:32]}"

    def info(self, experiment: str, transcript: Transcript, spans: list[Span]) -> TraceInfo:
        group = transcript.groups[self.number]
        name = f"step {self.step}, group {self.number}"
        prompt = next((str(span.inputs) for span in spans if span.span_type == SpanType.LLM), "")
        return TraceInfo(
            trace_id=self.trace_id,
            trace_location=TraceLocation.from_experiment_id(experiment),
            request_time=spans[0].start_time_ns // 10**6,
            execution_duration=0,
            state=TraceState.ERROR if group.trajectories is None else TraceState.OK,
            request_preview=prompt[:_PREVIEW],
            response_preview=str(spans[0].outputs)[:_PREVIEW],
            trace_metadata={TraceMetadataKey.SOURCE_RUN: self.run_id},
            tags={TraceTagKey.TRACE_NAME: name, "step": str(self.step), "tags": " ".join(group.tags)},
            assessments=list(_assessments(self, transcript)),
        )

    def feedback(self, span: str, name: str, value: float, source: AssessmentSource) -> Feedback:
        """Assessment of a span."""
        return Feedback(name=name, value=value, source=source, trace_id=self.trace_id, span_id=self.span_id(span))

    def span_id(self, name: str) -> str:
        return self._digest(name)[:16]

    def span(self, name: str, parent: str, kind: str, inputs: object, outputs: Mapping[str, Any]) -> Span:
        """Finished span; `name` and `parent` identify spans within the trace, and the root's parent is empty."""
        attributes = {
            SpanAttributeKey.REQUEST_ID: self.trace_id,
            SpanAttributeKey.SPAN_TYPE: kind,
            SpanAttributeKey.INPUTS: inputs,
            SpanAttributeKey.OUTPUTS: outputs,
        }
        now = time.time_ns()
        return Span.from_dict(
            {
                "name": name,
                "trace_id": self.trace_id,
                "span_id": self.span_id(name),
                "parent_span_id": self.span_id(parent) if parent else None,
                "start_time_unix_nano": now,  # the time of the rollout is unknown; this keeps the order of the turns
                "end_time_unix_nano": now,
                "status": {"code": "STATUS_CODE_OK", "message": ""},
                "attributes": {key: json.dumps(value) for key, value in attributes.items()},
                "events": [],
            }
        )

    def _digest(self, *path: str) -> str:
        return hashlib.sha256("/".join([self.run_id, str(self.step), str(self.number), *path]).encode()).hexdigest()


def _spans(trace: _Trace, tokenizer: Tokenizer, transcript: Transcript) -> Iterator[Span]:
    group = transcript.groups[trace.number]
    errors = [f"{error.error_type}: {error.error_message}" for error in group.errors]
    trajectories = group.trajectories
    rewards = trajectories.get_total_rewards() if trajectories else []
    yield trace.span("group", "", SpanType.CHAIN, {"tags": list(group.tags)}, {"rewards": rewards, "errors": errors})
    for index, trajectory in enumerate(trajectories.trajectories_G if trajectories else ()):
        answer = f"answer {index}"
        scores = transcript.scores.get((trace.number, index), {})
        yield trace.span(answer, "group", SpanType.AGENT, {}, {"reward": rewards[index], "terms": dict(scores)})
        for number, turn in enumerate(trajectory.transitions):
            text = str(tokenizer.decode(list(turn.ac.tokens)))
            metrics = {key: value for key, value in turn.metrics.items() if isinstance(value, int | float)}
            outputs = {"text": text, "reward": turn.reward, "metrics": metrics}
            prompt = {"prompt": prompt_text(tokenizer, turn.ob)}
            yield trace.span(f"{answer}, turn {number}", answer, SpanType.LLM, prompt, outputs)


def _assessments(trace: _Trace, transcript: Transcript) -> Iterator[Assessment]:
    """Yield the reward, the metrics of the environment and the scores of the terms of each member of a group."""
    trajectories = transcript.groups[trace.number].trajectories
    if trajectories is None:
        return
    for index, reward in enumerate(trajectories.get_total_rewards()):
        answer = f"answer {index}"
        metrics = trajectories.metrics_G[index]
        is_judged = any(name.startswith(_JUDGE_PREFIX) for name in metrics)
        judge = AssessmentSource(AssessmentSourceType.LLM_JUDGE, "judge")
        environment = AssessmentSource(AssessmentSourceType.CODE, "environment")
        yield trace.feedback(answer, "reward", reward, judge if is_judged else environment)
        for name, value in metrics.items():
            if isinstance(value, int | float):
                yield trace.feedback(answer, name, value, judge if name.startswith(_JUDGE_PREFIX) else environment)
        for name, score in transcript.scores.get((trace.number, index), {}).items():
            source = AssessmentSource(AssessmentSourceType.CODE, f"term {name}")
            yield trace.feedback(answer, f"term/{name}", float(score), source)
