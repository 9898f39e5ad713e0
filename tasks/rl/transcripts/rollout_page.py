"""HTML page of a step's rollouts: prompts, completions shaded by their logprobs, and rewards."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from tinker_cookbook.rl.types import Trajectory, Transition
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.storage import RunDirectory
from tasks.common.task import retried_task
from tasks.reports.html import html_page
from tasks.rl.rollouts.group_rollout import Group
from tasks.rl.transcripts.rollout_log import Transcript, metrics_text, prompt_text
from tasks.training.tracking.metrics import MetricsLog

# Negative logprob in nats at which the shade reaches its maximum.
_DARKEST = 6.0

_BODY = """<style>
pre {{ white-space: pre-wrap; text-align: left }}
span {{ white-space: pre-wrap }} summary {{ cursor: pointer; margin: .4rem 0 }}
</style>
<h1>Step {step}</h1>
<p>Groups of rollouts of this step. Darker tokens were less likely when sampled; hover over a token for its
logprob.</p>
{terms}
{groups}
"""


@retried_task(name="transcripts", task_run_name="transcripts-{step}")
def write_transcript(
    directory: RunDirectory, log: MetricsLog, tokenizer: Tokenizer, step: int, transcript: Transcript
) -> None:
    """Save the page of a step in the run's directory and in MLflow."""
    page = transcript_page(tokenizer, step, transcript)
    directory.write_bytes(f"transcripts-{step:06d}.html", page.encode())
    log.client.log_text(log.run_id, page, f"transcripts/{step:06d}.html")


def transcript_page(tokenizer: Tokenizer, step: int, transcript: Transcript) -> str:
    """Self-contained page of a step."""
    groups = []
    for number, group in enumerate(transcript.groups):
        members = range(len(group.trajectories.trajectories_G) if group.trajectories else 0)
        scores = [transcript.scores.get((number, member), {}) for member in members]
        groups.append(_group(tokenizer, number, group, scores))
    terms = ""
    if transcript.values:
        terms = (
            f"<p>Values of the terms over the step: {html.escape(metrics_text(transcript.values))}. Each trained "
            "completion below shows its own values; the value of a per-token term is its mean over the tokens.</p>"
        )
    return html_page(f"Step {step}", _BODY.format(step=step, terms=terms, groups="\n".join(groups)))


def _group(tokenizer: Tokenizer, number: int, group: Group, scores: Sequence[Mapping[str, float]]) -> str:
    title = html.escape(" ".join([f"Group {number}", *group.tags]))
    errors = "".join(f"<p>{html.escape(f'{error.error_type}: {error.error_message}')}</p>" for error in group.errors)
    if group.trajectories is None:
        return f"<details><summary><b>{title}</b>: failed</summary>{errors}</details>"
    rewards = group.trajectories.get_total_rewards()
    members = "".join(
        f"<h3>Answer {index}: reward {reward:.4g}</h3><p>{html.escape(metrics_text(scores[index]))}</p>"
        f"{_answer(tokenizer, trajectory)}"
        for index, (trajectory, reward) in enumerate(zip(group.trajectories.trajectories_G, rewards, strict=True))
    )
    rewards_text = ", ".join(f"{reward:.4g}" for reward in rewards)
    return f"<details><summary><b>{title}</b>: rewards {rewards_text}</summary>{errors}{members}</details>"


def _answer(tokenizer: Tokenizer, trajectory: Trajectory) -> str:
    return "".join(
        f"<pre>{html.escape(prompt_text(tokenizer, turn.ob))}</pre>{_completion(tokenizer, turn)}"
        for turn in trajectory.transitions
    )


def _completion(tokenizer: Tokenizer, turn: Transition) -> str:
    logprobs = turn.ac.maybe_logprobs or [math.nan] * len(turn.ac.tokens)
    tokens = "".join(
        f'<span title="{logprob:.2f}" style="background: rgba(220, 90, 0, {_shade(logprob):.2f})">'
        f"{html.escape(str(tokenizer.decode([token])))}</span>"
        for token, logprob in zip(turn.ac.tokens, logprobs, strict=True)
    )
    metrics = ", ".join([f"reward {turn.reward:.4g}", *(f"{key} {value}" for key, value in turn.metrics.items())])
    return f"<p>{tokens}</p><p><small>{html.escape(metrics)}</small></p>"


def _shade(logprob: float) -> float:
    return 0.0 if math.isnan(logprob) else min(max(-logprob, 0.0) / _DARKEST, 1.0)
