"""Evaluator of the student's and the teacher's NLL on held-out sequences."""

from __future__ import annotations

from collections.abc import Sequence

import tinker
import torch
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.tokenizer_utils import Tokenizer
from torch import Tensor

from objectives.losses import compute_mean_nll
from tasks.evaluation.evaluators import HeldOutNLL
from tasks.training.held_out import GradedMetrics
from tasks.training.teacher import trained_positions


class TeacherNLL(HeldOutNLL):
    """NLL of held-out sequences under the student and their teachers.

    `test/nll_teacher` weights tokens as `test/nll` does. A teacher's prompt may differ from the student's, for example
    by extra context. If the two values are equal, the student has learned everything that the teacher gains from its
    prompt.
    """

    def __init__(self, datums: Sequence[tinker.Datum], logprobs_D: Sequence[Tensor], tokenizer: Tokenizer) -> None:
        """Create an evaluator of held-out sequences.

        Args:
            datums: held-out sequences.
            logprobs_D: teacher's logprobs of each datum's trained targets.
            tokenizer: tokenizer of the student.
        """
        super().__init__(_OneBatch(datums), tokenizer)
        weights = torch.cat([datum.loss_fn_inputs["weights"].to_torch()[trained_positions(datum)] for datum in datums])
        self._teacher = compute_mean_nll(torch.cat(list(logprobs_D)), weights)

    async def __call__(self, training_client: tinker.TrainingClient) -> GradedMetrics:
        student = await super().__call__(training_client)
        metrics = student | {"test/nll_teacher": self._teacher}
        return GradedMetrics(metrics, student.scores, student.problems, student.sizes, student.groups)


class _OneBatch(SupervisedDataset):
    def __init__(self, datums: Sequence[tinker.Datum]) -> None:
        self._datums = list(datums)

    def get_batch(self, index: int) -> list[tinker.Datum]:
        return self._datums

    def __len__(self) -> int:
        return 1
