"""Terms that go wrong in every way a user's term can."""

from __future__ import annotations

import torch

from objectives.term import regularizer


@regularizer("test_raises")
def raises(outputs, batch):
    raise KeyError("colour")


@regularizer("test_nan")
def nan(outputs, batch):
    return outputs.logprobs_DT * torch.nan


@regularizer("test_shape")
def shape(outputs, batch):
    return outputs.logprobs_DT[:-1]


@regularizer("test_no_gradient")
def no_gradient(outputs, batch):
    return outputs.logprobs_DT.detach().exp()


def no_features(batch):
    raise KeyError("shape")


@regularizer("test_prepare_raises", prepare=no_features)
def prepare_raises(outputs, batch):
    return outputs.logprobs_DT
