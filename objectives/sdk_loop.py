"""An objective in a training loop of one's own: the SDK alone, without flows."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from objectives.batch import Batch, Outputs, pack, unpack
from objectives.errors import ObjectiveError
from objectives.evaluate import Evaluation, evaluate_base
from objectives.fused import check_trained
from objectives.labels import read_labels
from objectives.linearize import Linearized, linearize
from objectives.objective import Objective, Regularizer
from objectives.one_pass import OnePass

# What a datum may say of each of its tokens, beside its logprob, under the same names in the batch.
_READ = ("advantages", "values", "returns")

T = TypeVar("T")

_LOG = logging.getLogger(__name__)


class TrainingClient(Protocol):
    """What is used of a `tinker.TrainingClient`."""

    def get_tokenizer(self) -> Any: ...

    def forward_backward_custom(self, data: Any, loss_fn: Any) -> Any: ...


def forward_backward_regularized(
    training_client: TrainingClient,
    data: Sequence[Any],
    objective: Objective | OnePass,
    *,
    step: int = 0,
    num_steps: int = 1,
    ref_logprobs_D: Sequence[Tensor] | None = None,
) -> Any:
    """`forward_backward` with an objective for its loss: the same requests that a flow sends.

    The terms are prepared at once; their values and gradients are computed from the answer of the forward pass, and the
    backward pass is sent with the linearized weights. Both passes have their place in the client's order
    before this returns, so `optim_step` may follow at once, as after the SDK's own `forward_backward`::

        pending = forward_backward_regularized(client, data, objective, step=step, num_steps=100)
        update = client.optim_step(tinker.AdamParams(learning_rate=1e-4))
        print(pending.result().metrics["term/confidence/grad_share"])
        update.result()

    Given ``OnePass(objective, service_client)`` in the place of the objective, a step is one pass where the base loss
    and every term can be traced (the objective's ``backend``): the service runs the objective itself, and the terms
    are evaluated here on the logprobs that it returns, for the metrics alone.

    Of a datum's ``loss_fn_inputs`` are read: ``target_tokens``; ``weights``, or else ``mask``, or else where
    ``advantages`` are not 0, or else all tokens; ``logprobs`` (of the sampling policy), ``advantages``, and a critic's
    ``values`` and ``returns``, where the base loss or a term needs them; labels (`objectives.labels`). The service is
    sent tokens and weights only, and in one pass what the objective reads.

    Args:
        objective: make it, or its `OnePass`, once, and use it for all steps.
        step: counts from 0, with ``num_steps`` for the schedules of weights; a term is due as it says in ``every``.
        ref_logprobs_D: nats: of each datum the logprobs of its targets under the reference, shaped as the targets.

    Returns:
        The ``APIFuture`` of the backward pass; its metrics are those of `linearize`, and ``loss:sum`` is the total.

    Raises:
        ObjectiveError: at once, if the data lacks what the objective needs, a term fails preparing, or the backend is
            ``server`` and cannot be. A term that fails later, unless it is skipped, fails the future; of two passes
            the SDK then refuses all that follows.
    """
    one_pass, objective = _parts(objective)
    batch = pack_data(data, training_client.get_tokenizer())
    given = _outputs_but_logprobs(data, ref_logprobs_D)
    topk = ["topk_logprobs"] if batch.target_tokens_DT.ndim == 2 else []
    read = [key for key in _READ if getattr(batch, f"{key}_DT") is not None]
    objective.check_needs([*(key.removesuffix("_DT") for key in given), *read, *topk])
    due = [each for each in objective.regularizers if each.due_at(step)]
    ahead = [(each, _prepare(objective, each, batch)) for each in due]
    this = _Step(objective, batch, given, ahead, step, num_steps)
    unknown = this.outputs(torch.zeros(batch.target_tokens_DT.shape))
    loss = one_pass.loss_at(step, unknown, batch) if one_pass else None
    for note in one_pass.take_notes() if one_pass else ():
        _LOG.info(note)
    if one_pass and loss:
        sent = loss.data_at(unknown, batch, lambda each: each.weight_at(step, num_steps))
        return one_pass.then(loss.send(training_client, sent), this.measure)
    return training_client.forward_backward_custom(list(data), this.compute_loss)


@dataclass(frozen=True, slots=True)
class _Step:
    """What is known of a step before its logprobs are."""

    objective: Objective
    batch: Batch
    given: Mapping[str, Tensor]
    ahead: Sequence[tuple[Regularizer, Batch | ObjectiveError]]
    step: int
    num_steps: int

    def outputs(self, logprobs_DT: Tensor) -> Outputs:
        return Outputs(logprobs_DT, **self.given)

    def compute_loss(self, _: Any, logprobs_D: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        """Of two passes, what the SDK calls between them."""
        linear = self._linearize(pack([each.detach() for each in logprobs_D])[0])
        weights_D = unpack(linear.loss_weights_DT, self.batch.offsets_D)
        # Of the value of the objective, and of its gradient.
        moved = torch.stack([((x - x.detach()) * w).sum() for x, w in zip(logprobs_D, weights_D, strict=True)]).sum()
        return linear.metrics["loss/total"] - moved, linear.metrics

    def measure(self, output: Any) -> Any:
        """Of one pass, its answer with the metrics of the terms."""
        linear = self._linearize(pack([each["logprobs"].to_torch().float() for each in output.loss_fn_outputs])[0])
        check_trained(self.step, output.metrics["loss:sum"], linear)
        output.metrics.update(linear.metrics)
        return output

    def _linearize(self, logprobs_DT: Tensor) -> Linearized:
        objective, outputs, step = self.objective, self.outputs(logprobs_DT), self.step
        terms: list[tuple[Evaluation, float]] = []
        skipped: dict[str, float] = {}
        for each, prepared in self.ahead:
            evaluate = partial(_evaluate, objective, each, outputs, prepared, step == 0)
            evaluation, error = objective.runner.settle(each, outputs, evaluate)
            if error:
                skipped[f"term/{each.name}/skipped"] = 1.0
            if evaluation:
                terms.append((evaluation, each.weight_at(step, self.num_steps)))
        linear = linearize(evaluate_base(objective, outputs, self.batch, step == 0), terms, objective.balance, step)
        smoothed = objective.watch.look(step, linear.metrics)
        return Linearized(linear.loss_weights_DT, {**linear.metrics, **smoothed, **skipped})


def _parts(objective: Objective | OnePass) -> tuple[OnePass | None, Objective]:
    if isinstance(objective, OnePass):
        return objective, objective.objective
    if objective.backend == "server":
        raise ObjectiveError(
            "The objective's backend is 'server', and no service client is here to make it a loss there: give "
            "OnePass(objective, service_client) in its place."
        )
    return None, objective


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
        **{f"{key}_DT": _read_all(data, key) for key in _READ},
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


def _attempt(regularizer: Regularizer, compute: Callable[[], T]) -> T:
    for left in range(regularizer.retries, -1, -1):
        try:
            return compute()
        except ObjectiveError:
            if left == 0:
                raise
    raise AssertionError("unreachable: the last attempt returns or raises")


def _prepare(objective: Objective, regularizer: Regularizer, batch: Batch) -> Batch | ObjectiveError:
    """The batch with the term's features, or the error for which the term will be skipped."""
    try:
        features = _attempt(regularizer, partial(objective.runner.prepare, regularizer, batch))
    except ObjectiveError as error:
        if regularizer.on_error == "raise":
            raise
        return error
    return replace(batch, features=features)


def _evaluate(
    objective: Objective, regularizer: Regularizer, outputs: Outputs, prepared: Batch | ObjectiveError, first: bool
) -> Evaluation:
    if isinstance(prepared, ObjectiveError):
        raise prepared
    return _attempt(regularizer, partial(objective.runner.evaluate, regularizer, outputs, prepared, first))
