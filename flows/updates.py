"""The updates of a step: what is sent for each of its minibatches, and what is read of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from flows.loop import Loop, Sent, SentBatch
from flows.one_pass import loss_of
from flows.step import Ahead, Forward, compute_linearized, enqueue_forward_ahead, measure
from objectives.batch import Batch, Outputs
from objectives.fused import check_trained
from objectives.linearize import Linearized, join_metrics
from objectives.losses import compute_mean_nll
from objectives.one_pass import ServiceLoss
from objectives.regularizer import Regularizer
from tasks.features import save_kept
from tasks.options import call, whole
from tasks.reference import REFERENCE_NAME
from tasks.source import Trained
from tasks.update import PendingUpdate, enqueue_one_pass_update, enqueue_update, forward_backward, optim_step


def send(loop: Loop, step: int, parts: Sequence[Ahead], forward: Forward | None) -> Sent:
    """Send the updates of a step, and right behind them the save that is due, before any later request."""
    plan, saving = loop.plan, None
    batches: list[SentBatch] = []
    for number, ahead in enumerate(parts, start=1):
        if number > 1:
            forward = ask_forward(loop, ahead) if looks_ahead(loop, ahead) else None
        linearized = None
        if forward:
            compute = partial(compute_linearized, loop.objective, ahead, forward, plan.num_steps, step == 0)
            linearized = loop.guard.look(step, compute)
        if linearized:
            record_seen(loop)
        if step not in loop.guard.passed_over:
            update = _send_batch(loop, ahead, linearized, is_last=number % loop.source.num_minibatches == 0)
            batches.append(SentBatch(ahead, update, linearized))
    if plan.saves_before(step + 1):
        saving = loop.checkpoints.enqueue(step + 1, final=step + 1 == plan.num_steps)
    return Sent(batches, saving)


def read_answers(loop: Loop, step: int, batches: Sequence[SentBatch]) -> dict[str, float]:
    """Wait for the answers to the updates of a step; its metrics."""
    metrics: dict[str, float] = {}
    objectives: list[dict[str, float]] = []
    trained: list[Trained] = []
    for each in batches:
        ahead, update, linearized, batch = each.ahead, each.update, each.linearized, each.ahead.batch.result()
        with loop.guard.answers(step):
            outputs = call(forward_backward, update.forward_backward, whole(batch))
            metrics |= call(optim_step, update.optim_step) if update.optim_step else {}
        loop.guard.check_metrics(step, metrics)
        if linearized is None:
            linearized = loop.guard.look(step, partial(_measure, loop, ahead, outputs, batch, update))
            assert linearized is not None, "what was sent is never skipped"
            record_seen(loop)
        objectives.append(linearized.metrics)
        trained.append(Trained(batch, outputs.logprobs_DT, linearized.by_datum))
    joined = join_metrics(objectives)
    logprobs_DT = torch.cat([each.logprobs_DT for each in trained])
    nll = compute_mean_nll(logprobs_DT, torch.cat([each.batch.weights_DT for each in trained]))
    return (
        metrics
        | loop.source.metrics(step, trained, joined)
        | joined
        | loop.objective.watch.look(step, joined)
        | {"train_mean_nll": nll, "num_tokens": sum(each.batch.num_tokens for each in trained)}
    )


def looks_ahead(loop: Loop, ahead: Ahead) -> bool:
    """Whether the update of a batch has to know its logprobs."""
    return ahead.passes == 2 and _loss_of(loop, ahead) is None


def ask_forward(loop: Loop, ahead: Ahead) -> Forward:
    """Ask for a batch's forward pass."""
    forward = enqueue_forward_ahead(loop.run.client, ahead)
    loop.ledger.add(forward.batch.num_tokens)
    return forward


def record_seen(loop: Loop) -> None:
    """Record what was saved of weights that have turned out fit: a checkpoint never holds others."""
    for saving, state in loop.unseen:
        save_kept(loop.objective.runner.cache, loop.run.directory)
        if loop.reference:
            save_kept(loop.reference.kept, loop.run.directory, REFERENCE_NAME)
        loop.checkpoints.record(saving, state | {"spent": loop.ledger.state()})
    loop.unseen.clear()


def _send_batch(loop: Loop, ahead: Ahead, linearized: Linearized | None, *, is_last: bool) -> PendingUpdate:
    """Ask for the gradient of a minibatch, and behind the last one of an update for its optimizer step."""
    plan, client, step, batch = loop.plan, loop.run.client, ahead.step, ahead.batch.result()
    adam = plan.config.adam.at(plan.learning_rate_at(step)) if is_last else None
    loss = None if linearized else _loss_of(loop, ahead)
    loop.trained = batch
    loop.ledger.add(batch.num_tokens)
    if loss:
        weight_of = partial(Regularizer.weight_at, step=step, num_steps=plan.num_steps, share=ahead.share)
        return enqueue_one_pass_update(client, batch, ahead.beside(), loss, weight_of, adam)
    return enqueue_update(client, batch, linearized.loss_weights_DT if linearized else batch.weights_DT, adam)


def _loss_of(loop: Loop, ahead: Ahead) -> ServiceLoss | None:
    """The loss that the service has for a step in one pass; None where the guards look at a forward pass first."""
    first = loop.plan.config.guards.looks_first
    return None if first else loss_of(loop.run, loop.one_pass, ahead.step, ahead.beside(), ahead.batch.result())


def _measure(loop: Loop, ahead: Ahead, outputs: Outputs, batch: Batch, update: PendingUpdate) -> Linearized:
    """The metrics of a step that was one pass, and a check that it was trained on what they say."""
    linearized = measure(loop.objective, ahead, outputs, batch, loop.plan.num_steps, ahead.step == 0)
    check_trained(ahead.step, update.forward_backward.result().metrics["loss:sum"], linearized)
    return linearized
