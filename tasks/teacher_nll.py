"""Held-out sequences: how likely the student finds them, and how likely its teacher does."""

from __future__ import annotations

from collections.abc import Sequence

import tinker
import torch
from tinker_cookbook.supervised.types import SupervisedDataset
from tinker_cookbook.tokenizer_utils import Tokenizer
from torch import Tensor

from objectives.losses import compute_mean_nll
from tasks.evaluate import HeldOutNLL
from tasks.teacher import trained_of


class TeacherNLL(HeldOutNLL):
    """`test/nll` of held-out sequences by the student, and `test/nll_teacher` by their teachers.

    A teacher sees what it was shown, such as a long prompt, and the student what it is asked: where they meet, the
    student has learned all of it.
    """

    def __init__(self, datums: Sequence[tinker.Datum], logprobs_D: Sequence[Tensor], tokenizer: Tokenizer) -> None:
        """Args: logprobs_D: of the trained targets of each datum, by its teacher."""
        super().__init__(_Fixed(datums), tokenizer)
        weights = torch.cat([each.loss_fn_inputs["weights"].to_torch()[trained_of(each)] for each in datums])
        self._teacher = compute_mean_nll(torch.cat(list(logprobs_D)), weights)

    async def __call__(self, training_client: tinker.TrainingClient) -> dict[str, float]:
        return await super().__call__(training_client) | {"test/nll_teacher": self._teacher}


class _Fixed(SupervisedDataset):
    def __init__(self, datums: Sequence[tinker.Datum]) -> None:
        self._datums = list(datums)

    def get_batch(self, index: int) -> list[tinker.Datum]:
        return self._datums

    def __len__(self) -> int:
        return 1
