"""What was played at a step as MLflow traces: one for each group, with a span for each member and each of its turns."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mlflow.entities import Span, SpanType, TraceInfo, TraceLocation, TraceState
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import SpanAttributeKey, TraceMetadataKey, TraceTagKey
from tinker_cookbook.tokenizer_utils import Tokenizer

from tasks.metrics import MetricsLog
from tasks.options import retried_task
from tasks.transcript import Transcript, prompt_text

_PREVIEW = 1000  # characters


@retried_task(name="traces", task_run_name="traces-{step}")
def write_traces(log: MetricsLog, tokenizer: Tokenizer, step: int, transcript: Transcript) -> None:
    """Write them to the run's own tracking server and experiment; those that a killed run left of the step go."""
    client = TracingClient(log.client.tracking_uri)  # that of the process may be another
    experiment = log.client.get_run(log.run_id).info.experiment_id
    traces = [_Trace(log.run_id, step, number) for number in range(len(transcript.groups))]
    client.delete_traces(experiment, trace_ids=[each.trace_id for each in traces])
    spans: list[Span] = []
    for each in traces:
        of_group = list(_spans(each, tokenizer, transcript))
        client.start_trace(each.info(experiment, transcript, of_group))
        spans += of_group
    client.log_spans(experiment, spans)


@dataclass(frozen=True, slots=True)
class _Trace:
    """The trace of a group, whose ids follow from where it stands: written twice, it is there once."""

    run_id: str
    step: int
    number: int

    @property
    def trace_id(self) -> str:
        return f"tr-{self._digest()[:32]}"

    def info(self, experiment: str, transcript: Transcript, spans: list[Span]) -> TraceInfo:
        group = transcript.groups[self.number]
        name = f"step {self.step}, group {self.number}"
        prompt = next((str(each.inputs) for each in spans if each.span_type == SpanType.LLM), "")
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
        )

    def span(self, name: str, parent: str, kind: str, inputs: object, outputs: Mapping[str, Any]) -> Span:
        """A finished span; `name` is its path in the trace, and `parent` that of the one it is in."""
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
                "span_id": self._digest(name)[:16],
                "parent_span_id": self._digest(parent)[:16] if parent else None,
                "start_time_unix_nano": now,  # when it was played is not known: in the order of the turns
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
    errors = [f"{each.error_type}: {each.error_message}" for each in group.errors]
    played = group.trajectories
    rewards = played.get_total_rewards() if played else []
    yield trace.span("group", "", SpanType.CHAIN, {"tags": list(group.tags)}, {"rewards": rewards, "errors": errors})
    for index, trajectory in enumerate(played.trajectories_G if played else ()):
        answer = f"answer {index}"
        scores = transcript.scores.get((trace.number, index), {})
        yield trace.span(answer, "group", SpanType.AGENT, {}, {"reward": rewards[index], "terms": dict(scores)})
        for number, turn in enumerate(trajectory.transitions):
            said = str(tokenizer.decode(list(turn.ac.tokens)))
            figures = {key: value for key, value in turn.metrics.items() if isinstance(value, int | float)}
            outputs = {"text": said, "reward": turn.reward, "metrics": figures}
            prompt = {"prompt": prompt_text(tokenizer, turn.ob)}
            yield trace.span(f"{answer}, turn {number}", answer, SpanType.LLM, prompt, outputs)
