"""An objective in a training loop of one's own: the SDK alone, without flows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs, pack, unpack
from objectives.errors import ObjectiveError
from objectives.evaluate import Evaluation, evaluate_base
from objectives.labels import read_labels
from objectives.linearize import Linearized, linearize
from objectives.objective import Objective, Regularizer


class TrainingClient(Protocol):
    """What is used of a `tinker.TrainingClient`."""

    def get_tokenizer(self) -> Any: ...

    def forward_backward_custom(self, data: Any, loss_fn: Any) -> Any: ...


def forward_backward_regularized(
    training_client: TrainingClient,
    data: Sequence[Any],
    objective: Objective,
    *,
    step: int = 0,
    num_steps: int = 1,
    ref_logprobs_D: Sequence[Tensor] | None = None,
) -> Any:
    """`forward_backward` with an objective for its loss: the same two requests that a flow sends.

    The terms are prepared at once; their values and gradients are computed from the answer of the forward pass, and the
    backward pass is sent with the linearized weights. Both passes have their place in the client's order
    before this returns, so `optim_step` may follow at once, as after the SDK's own `forward_backward`::

        pending = forward_backward_regularized(client, data, objective, step=step, num_steps=100)
        update = client.optim_step(tinker.AdamParams(learning_rate=1e-4))
        print(pending.result().metrics["term/confidence/grad_share"])
        update.result()

    Of a datum's ``loss_fn_inputs`` are read: ``target_tokens``; ``weights``, or else ``mask``, or else where
    ``advantages`` are not 0, or else all tokens; ``logprobs`` (of the sampling policy) and ``advantages``, where the
    base loss or a term needs them; labels (`objectives.labels`). The service is sent tokens and weights only.

    Args:
        step: counts from 0, with ``num_steps`` for the schedules of weights; a term is due as it says in ``every``.
        ref_logprobs_D: nats: of each datum the logprobs of its targets under the reference, shaped as the targets.

    Returns:
        The ``APIFuture`` of the backward pass; its metrics are those of `linearize`, and ``loss:sum`` is the total.

    Raises:
        ObjectiveError: at once, if the data lacks what the objective needs or a term fails preparing. A term
            that fails later, unless it is skipped, fails the future, and the SDK then refuses all that follows it.
    """
    batch = pack_data(data, training_client.get_tokenizer())
    given = _outputs_but_logprobs(data, ref_logprobs_D)
    topk = ["topk_logprobs"] if batch.target_tokens_DT.ndim == 2 else []
    advantages = ["advantages"] if batch.advantages_DT is not None else []
    objective.check_needs([*(key.removesuffix("_DT") for key in given), *advantages, *topk])
    due = [each for each in objective.regularizers if each.due_at(step)]
    ahead = [(each, _attempt(each, partial(objective.runner.prepare, each, batch))) for each in due]

    def compute_loss(_: Any, logprobs_D: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        outputs = Outputs(pack([each.detach() for each in logprobs_D])[0], **given)
        linear = _linearize(objective, outputs, batch, ahead, (step, num_steps))
        weights_D = unpack(linear.loss_weights_DT, batch.offsets_D)
        # Of the value of the objective, and of its gradient.
        moved = torch.stack([((x - x.detach()) * w).sum() for x, w in zip(logprobs_D, weights_D, strict=True)]).sum()
        return linear.metrics["loss/total"] - moved, linear.metrics

    return training_client.forward_backward_custom(list(data), compute_loss)


def pack_data(data: Sequence[Any], tokenizer: Any) -> Batch:
    """The service's datums as a batch; `forward_backward_regularized` says what is read of them.

    The text of a datum is decoded from its trained targets; there is none where a position has several.
    """
    targets_D = [datum.loss_fn_inputs["target_tokens"].to_torch().long() for datum in data]
    weights_D = [_weights(datum, targets) for datum, targets in zip(data, targets_D, strict=True)]
    target_tokens_DT, offsets_D = pack(targets_D)
    texts_D: tuple[str, ...] = ()
    if target_tokens_DT.ndim == 1:
        trained = [targets[weights != 0] for targets, weights in zip(targets_D, weights_D, strict=True)]
        texts_D = tuple(str(tokenizer.decode(targets.tolist())) for targets in trained)
    return Batch(
        target_tokens_DT,
        pack(weights_D)[0],
        offsets_D,
        texts_D,
        datums=tuple(data),
        advantages_DT=_read_all(data, "advantages"),
        labels_D=read_labels(data),
    )


def _weights(datum: Any, targets: Tensor) -> Tensor:
    for key in ("weights", "mask", "advantages"):
        if key in datum.loss_fn_inputs:
            weights = datum.loss_fn_inputs[key].to_torch().float()
            return (weights != 0).float() if key == "advantages" else weights
    return torch.ones(targets.shape)


def _read_all(data: Sequence[Any], key: str) -> Tensor | None:
    if not all(key in datum.loss_fn_inputs for datum in data):
        return None
    return pack([datum.loss_fn_inputs[key].to_torch().float() for datum in data])[0]


def _outputs_but_logprobs(data: Sequence[Any], ref_logprobs_D: Sequence[Tensor] | None) -> dict[str, Tensor]:
    found = {
        "ref_logprobs_DT": None if ref_logprobs_D is None else pack([each.float() for each in ref_logprobs_D])[0],
        "sampling_logprobs_DT": _read_all(data, "logprobs"),
    }
    return {key: value for key, value in found.items() if value is not None}


def _attempt(regularizer: Regularizer, compute: Callable[[], Any]) -> Any:
    """What a part of a term computes, or the error for which it is skipped."""
    for left in range(regularizer.retries, -1, -1):
        try:
            return compute()
        except ObjectiveError as error:
            if left == 0:
                if regularizer.on_error == "raise":
                    raise
                return error
    raise AssertionError("unreachable: the last attempt returns or raises")


def _linearize(
    objective: Objective,
    outputs: Outputs,
    batch: Batch,
    ahead: Sequence[tuple[Regularizer, Any]],
    progress: tuple[int, int],
) -> Linearized:
    step, num_steps = progress
    terms: list[tuple[Evaluation, float]] = []
    skipped: dict[str, float] = {}
    for each, features in ahead:
        done = features
        if not isinstance(features, ObjectiveError):
            prepared = replace(batch, features=features)
            done = _attempt(each, partial(objective.runner.evaluate, each, outputs, prepared, step == 0))
        if isinstance(done, ObjectiveError):
            skipped[f"term/{each.name}/skipped"] = 1.0
            done = objective.runner.stand_in(each, outputs)
        if done is not None:
            terms.append((done, each.weight_at(step, num_steps)))
    linear = linearize(evaluate_base(objective, outputs, batch, step == 0), terms, objective.balance, step)
    smoothed = objective.watch.look(step, linear.metrics)
    return Linearized(linear.loss_weights_DT, {**linear.metrics, **smoothed, **skipped})
