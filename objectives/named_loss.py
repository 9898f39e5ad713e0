"""A base loss as the one of its name that every service has: a step is one pass, and nothing is uploaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from objectives.base_loss import PolicyLoss
from objectives.batch import Batch, Outputs, unpack
from objectives.objective import Objective
from objectives.regularizer import Regularizer

# dro holds every token of a datum on the service, those of the prompt too; the hosted stable_reinforce is another.
_SAME_ON_THE_SERVICE = frozenset({"importance_sampling", "ppo", "cispo", "gspo"})


@dataclass(frozen=True, slots=True)
class NamedLoss:
    """A policy loss of the service, by its name."""

    base: PolicyLoss

    def data_at(self, outputs: Outputs, batch: Batch, _: Callable[[Regularizer], float]) -> list[Any]:
        """The service's datums with what the loss reads; what is not trained has no advantage."""
        assert outputs.sampling_logprobs_DT is not None, "held by needs"
        assert batch.advantages_DT is not None, "held by needs"
        found = {
            "logprobs": outputs.sampling_logprobs_DT,
            "advantages": torch.where(batch.mask_DT, batch.advantages_DT, 0.0),
            "sequence_ratio_mask": batch.mask_DT.float(),
        }
        read_D = {name: unpack(found[name], batch.offsets_D) for name in self.base.loss.inputs}
        return [
            replace(
                datum,
                loss_fn_inputs={
                    "target_tokens": datum.loss_fn_inputs["target_tokens"],
                    **{name: parts_D[d] for name, parts_D in read_D.items()},  # the SDK's datum takes tensors
                },
            )
            for d, datum in enumerate(batch.datums)
        ]

    def send(self, training_client: Any, data: list[Any]) -> Any:
        """The SDK's future of the backward pass."""
        return training_client.forward_backward(data, self.base.loss.name, dict(self.base.params))


def named_loss(objective: Objective) -> NamedLoss | None:
    """What the service calls the whole of an objective; None where it has no name for it."""
    base = objective.base.term.evaluate if objective.base else None
    trains = any(each.term.kind != "monitor" for each in objective.regularizers)
    if not isinstance(base, PolicyLoss) or base.loss.name not in _SAME_ON_THE_SERVICE or trains or objective.balance:
        return None
    return NamedLoss(base)
