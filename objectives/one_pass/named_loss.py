"""Base losses that the service knows by name: a step takes one pass, and no custom loss has to be uploaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from objectives.base_loss import PolicyLoss
from objectives.batch import Batch, Outputs, unpack
from objectives.objective import Objective
from objectives.sdk.protocols import Datum, FutureT, TrainingClient
from objectives.term import Regularizer

# The service's dro penalizes prompt tokens as well, and the hosted stable_reinforce has another formula.
_SAME_ON_THE_SERVICE = frozenset({"importance_sampling", "ppo", "cispo", "gspo"})


@dataclass(frozen=True, slots=True)
class NamedLoss:
    """Policy loss that the service has by name."""

    policy_loss: PolicyLoss

    def build_data(self, outputs: Outputs, batch: Batch, _weight_of: Callable[[Regularizer], float]) -> list[Datum]:
        """Build the service's datums with the inputs of the loss; untrained tokens get advantage 0.

        `_weight_of` is unused, because there are no other terms.
        """
        assert outputs.sampling_logprobs_DT is not None, "guaranteed by the `needs` of the loss"
        assert batch.advantages_DT is not None, "guaranteed by the `needs` of the loss"
        tensors = {
            "logprobs": outputs.sampling_logprobs_DT,
            "advantages": torch.where(batch.mask_DT, batch.advantages_DT, 0.0),
            "sequence_ratio_mask": batch.mask_DT.float(),
        }
        inputs_D = {name: unpack(tensors[name], batch.offsets_D) for name in self.policy_loss.loss.inputs}
        return [
            replace(
                datum,
                loss_fn_inputs={
                    "target_tokens": datum.loss_fn_inputs["target_tokens"],
                    **{name: tensor_D[d] for name, tensor_D in inputs_D.items()},  # The SDK's datum converts tensors.
                },
            )
            for d, datum in enumerate(batch.datums)
        ]

    def send(self, training_client: TrainingClient[FutureT], data: list[Datum]) -> FutureT:
        """Send the forward and backward pass; return the future of the SDK."""
        return training_client.forward_backward(data, self.policy_loss.loss.name, dict(self.policy_loss.params))


def find_named_loss(objective: Objective) -> NamedLoss | None:
    """Return the service's loss that equals the objective; None if the service has no such loss."""
    policy_loss = objective.base.term.evaluate if objective.base else None
    has_terms = any(regularizer.term.kind != "monitor" for regularizer in objective.regularizers)
    if not isinstance(policy_loss, PolicyLoss) or policy_loss.correction is not None:
        return None
    if policy_loss.loss.name not in _SAME_ON_THE_SERVICE:
        return None
    if has_terms or objective.balance:
        return None
    return NamedLoss(policy_loss)
