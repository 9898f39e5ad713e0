"""What was played at a step, to be read: one page of prompts, answers shaded by their logprobs, and rewards."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from tinker_cookbook.rl.types import Trajectory, Transition
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.storage import RunDirectory
from tasks.metrics import MetricsLog
from tasks.options import retried_task
from tasks.page import html_page
from tasks.rollout import Group
from tasks.transcript import Transcript, figures_text, prompt_text

# Nats; a token as unlikely as that, or more, is shaded as dark as can be.
_DARKEST = 6.0

_BODY = """<style>
pre {{ white-space: pre-wrap; text-align: left; background: #f6f6f6; padding: .5rem }}
span {{ white-space: pre-wrap }} summary {{ cursor: pointer; margin: .4rem 0 }}
</style>
<h1>Step {step}</h1>
<p>The groups that were played for this step. The less likely a token was where it was sampled, the darker it is; its
logprob is shown under the pointer.</p>
{terms}
{groups}
"""


@retried_task(name="transcripts", task_run_name="transcripts-{step}")
def write_transcript(
    directory: RunDirectory, log: MetricsLog, tokenizer: Tokenizer, step: int, transcript: Transcript
) -> None:
    """Keep the page of a step in the run's directory and in MLflow."""
    page = transcript_page(tokenizer, step, transcript)
    directory.write_bytes(f"transcripts-{step:06d}.html", page.encode())
    log.client.log_text(log.run_id, page, f"transcripts/{step:06d}.html")


def transcript_page(tokenizer: Tokenizer, step: int, transcript: Transcript) -> str:
    """The page of a step, which needs nothing beside itself."""
    shown = []
    for number, group in enumerate(transcript.groups):
        members = range(len(group.trajectories.trajectories_G) if group.trajectories else 0)
        scores = [transcript.scores.get((number, member), {}) for member in members]
        shown.append(_group(tokenizer, number, group, scores))
    said = (
        "Terms over the step, and below for each answer that was trained on, as the mean over its tokens where a term "
    )
    terms = (
        f"<p>{said}is one of tokens: {html.escape(figures_text(transcript.values))}.</p>" if transcript.values else ""
    )
    return html_page(f"Step {step}", _BODY.format(step=step, terms=terms, groups="\n".join(shown)))


def _group(tokenizer: Tokenizer, number: int, group: Group, scores: Sequence[Mapping[str, float]]) -> str:
    title = html.escape(" ".join([f"Group {number}", *group.tags]))
    errors = "".join(f"<p>{html.escape(f'{each.error_type}: {each.error_message}')}</p>" for each in group.errors)
    if group.trajectories is None:
        return f"<details><summary><b>{title}</b>: could not be played</summary>{errors}</details>"
    rewards = group.trajectories.get_total_rewards()
    members = "".join(
        f"<h3>Answer {index}: reward {reward:.4g}</h3><p>{html.escape(figures_text(scores[index]))}</p>"
        f"{_answer(tokenizer, trajectory)}"
        for index, (trajectory, reward) in enumerate(zip(group.trajectories.trajectories_G, rewards, strict=True))
    )
    said = ", ".join(f"{reward:.4g}" for reward in rewards)
    return f"<details><summary><b>{title}</b>: rewards {said}</summary>{errors}{members}</details>"


def _answer(tokenizer: Tokenizer, trajectory: Trajectory) -> str:
    return "".join(
        f"<pre>{html.escape(prompt_text(tokenizer, turn.ob))}</pre>{_said(tokenizer, turn)}"
        for turn in trajectory.transitions
    )


def _said(tokenizer: Tokenizer, turn: Transition) -> str:
    logprobs = turn.ac.maybe_logprobs or [math.nan] * len(turn.ac.tokens)
    tokens = "".join(
        f'<span title="{logprob:.2f}" style="background: rgba(220, 90, 0, {_shade(logprob):.2f})">'
        f"{html.escape(str(tokenizer.decode([token])))}</span>"
        for token, logprob in zip(turn.ac.tokens, logprobs, strict=True)
    )
    figures = ", ".join([f"reward {turn.reward:.4g}", *(f"{key} {value}" for key, value in turn.metrics.items())])
    return f"<p>{tokens}</p><p><small>{html.escape(figures)}</small></p>"


def _shade(logprob: float) -> float:
    return 0.0 if math.isnan(logprob) else min(max(-logprob, 0.0) / _DARKEST, 1.0)
