"""Terms with every kind of error that a user's term can have."""

from __future__ import annotations

import time

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


@regularizer("test_hangs_in_a_flow")
def hangs(outputs, batch):
    time.sleep(600)


@regularizer("test_changes_its_inputs")
def changes_its_inputs(outputs, batch):
    batch.weights_DT.zero_()
    return outputs.logprobs_DT


@regularizer("test_clash")
def clash(outputs, batch):
    return outputs.logprobs_DT, {"grad_share": 1.0}


CALLS = []


@regularizer("test_good_once", "scored")
def good_once(outputs, batch):
    CALLS.append(batch)
    if len(CALLS) > 1:
        raise KeyError("only once")
    return torch.arange(batch.num_datums), {"own": 5.0}


@regularizer("test_good_at_second")
def good_at_second(outputs, batch, *, calls: list[int]):
    calls.append(1)
    if len(calls) % 2:
        raise KeyError("try again")
    return outputs.logprobs_DT.exp()
