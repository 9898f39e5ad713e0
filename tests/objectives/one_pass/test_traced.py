"""Traced terms compared with the original terms on ragged batches, and terms that cannot be traced."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ragged_batches import make_batch, ragged, several, with_policies

from objectives import Objective, Regularizer, evaluate_term, regularizer
from objectives.config.term_lookup import registered_terms
from objectives.errors import UntraceableError
from objectives.one_pass.traced import InputSignature, TracedTerm, split_inputs, trace_term
from objectives.reductions import mean_by_datum, reduce
from objectives.term import Term

PARAMS = {"unlikely_tokens": {"tokens": (1, 2)}, "elastic_net": {"l1_ratio": 0.3, "of": "probabilities"}}
TRACED = {
    *("confidence", "elastic_net", "kl", "kl_unweighted", "l1", "l2", "magnitude", "negative_entropy", "sparsity"),
    "unlikely_tokens",
    *("divergence_topk", "label_divergence_topk", "negative_entropy_topk"),
}


def bind(fn: Term | str, **fields: object) -> Regularizer:
    name = fn if isinstance(fn, str) else fn.name
    return Objective(regularizers=[{"name": name, "fn": fn, "params": PARAMS.get(name, {}), **fields}]).regularizers[0]


def cases(seed: int = 0):
    lengths, masks = (3, 0, 5, 2), [True, True, False, *[True] * 5, False, False]
    batch, outputs = with_policies(*make_batch(lengths, seed=seed, masks=masks))
    return {1: (batch, outputs), 2: several(batch, outputs, num_targets=3)}


def by_datum(traced: TracedTerm, outputs, batch, weight: float = 1.0):
    """Evaluate a traced term datum by datum, as a service does, and add the values."""
    case, total = InputSignature.of(outputs, batch), torch.zeros(())
    inputs_D = split_inputs(outputs, batch)
    for inputs, scale in zip(inputs_D, traced.scales(batch, weight), strict=True):
        inputs["logprobs"] = inputs["logprobs"].clone().requires_grad_()
        total = total + traced.loss(inputs, case.mask(inputs), scale)
    gradients = torch.autograd.grad(total, [inputs["logprobs"] for inputs in inputs_D])
    return total.item(), torch.cat(gradients)


def test_traceable_terms_of_the_library():
    traced = set()
    for name, term in registered_terms().items():
        if not term.evaluate.__module__.startswith("objectives.") or name.startswith("doctest_"):
            continue  # registered by other tests
        batch, outputs = cases()[2 if "topk_logprobs" in term.needs else 1]
        if name in ("knowledge", "simulation"):  # scored terms with required parameters
            assert term.estimator == "auto"
            continue
        try:
            trace_term(bind(name), outputs, batch)
            traced.add(name)
        except UntraceableError:
            continue
    assert traced == TRACED


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("divergence_topk", kind) for kind in ("reverse", "forward", "symmetric", "jensen_shannon")),
        *(("label_divergence_topk", kind) for kind in ("forward", "jensen_shannon")),
    ],
)
def test_all_kinds_of_divergences_are_one_pass(name: str, kind: str) -> None:
    batch, outputs = cases()[2]
    bound = Objective(regularizers=[{"name": name, "params": {"kind": kind}}]).regularizers[0]
    traced = trace_term(bound, outputs, batch)
    expected = evaluate_term(bound, outputs, batch, first_step=False)
    value, gradient_DT = by_datum(traced, outputs, batch)
    assert value == pytest.approx(expected.value, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient_DT, expected.gradient_DT, rtol=1e-5, atol=1e-7)


@regularizer("test_traced_datum")
def likelihood_of_datum(outputs, batch, *, power: float = 2.0):
    return (mean_by_datum(outputs.logprobs_DT, batch) + 1).abs() ** power, {
        "size": mean_by_datum(batch.weights_DT, batch).sum()
    }


@regularizer("test_traced_double", reduction="sum")
def in_double(outputs, batch):
    return torch.nn.functional.softplus(outputs.logprobs_DT.double()) * batch.weights_DT


OWN = [likelihood_of_datum, in_double]


@settings(max_examples=25)
@given(ragged(), st.sampled_from(["token_mean", "sequence_mean", "sum"]))
@pytest.mark.parametrize("fn", [*sorted(TRACED), *OWN], ids=lambda fn: getattr(fn, "name", fn))
def test_value_and_gradient_match_the_term(fn, case, reduction):
    batch, outputs = with_policies(*case)
    term = bind(fn).term
    if "topk_logprobs" in term.needs:
        batch, outputs = several(batch, outputs, num_targets=3)
    bound = replace(bind(fn), term=replace(term, reduction=reduction))
    assume(batch.num_tokens > 1)  # magnitude has zero gradient for a single token
    # With one token per datum, a value per datum has the shape of one per token.
    assume(fn is not likelihood_of_datum or batch.num_tokens != batch.num_datums)
    traced = trace_term(bound, outputs, batch)
    expected = evaluate_term(bound, outputs, batch, first_step=False)
    value, gradient_DT = by_datum(traced, outputs, batch, weight=0.7)
    assert value == pytest.approx(0.7 * expected.value, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(gradient_DT, 0.7 * expected.gradient_DT, rtol=1e-5, atol=1e-7)


counter = itertools.count()


@regularizer("test_traced_centred")
def centred(outputs, batch):
    return (outputs.logprobs_DT - outputs.logprobs_DT.mean()) ** 2


@regularizer("test_traced_reduced")
def reduced(outputs, batch):
    return outputs.logprobs_DT * reduce(outputs.logprobs_DT, batch, "token_mean")


@regularizer("test_traced_neighbour")
def neighbour(outputs, batch):
    return outputs.logprobs_DT - outputs.logprobs_DT.roll(1)


@regularizer("test_traced_branch")
def branch(outputs, batch):
    return outputs.logprobs_DT**2 if outputs.logprobs_DT.min() < -1 else outputs.logprobs_DT


@regularizer("test_traced_float")
def number(outputs, batch):
    return outputs.logprobs_DT * float(outputs.logprobs_DT[0])


@regularizer("test_traced_tensor")
def own_tensor(outputs, batch):
    return outputs.logprobs_DT * torch.tensor([2.0])


@regularizer("test_traced_length")
def by_length(outputs, batch):
    return outputs.logprobs_DT / outputs.logprobs_DT.shape[0]


@regularizer("test_traced_texts")
def by_text(outputs, batch):
    return outputs.logprobs_DT * len(batch.texts_D)


@regularizer("test_traced_random")
def random(outputs, batch):
    return outputs.logprobs_DT * torch.rand_like(outputs.logprobs_DT)


@regularizer("test_traced_counter")
def counted(outputs, batch):
    return outputs.logprobs_DT * next(counter)


@regularizer("test_traced_numpy")
def numpy_one(outputs, batch):
    return torch.as_tensor(outputs.logprobs_DT.detach().numpy()) * outputs.logprobs_DT


@regularizer("test_traced_constant")
def constant(outputs, batch):
    return (outputs.logprobs_DT > -1).float()


@regularizer("test_traced_prepared", prepare=lambda batch: 2.0)
def prepared(outputs, batch):
    return outputs.logprobs_DT * batch.features


@regularizer("test_traced_async")
async def asynchronous(outputs, batch):
    return outputs.logprobs_DT


@pytest.mark.parametrize(
    ("fn", "fields", "message"),
    [
        (centred, {}, "its operation mean may combine several tokens"),
        (reduced, {}, "its operation sum may combine several tokens"),
        (neighbour, {}, "its operation roll may combine several tokens"),
        (branch, {}, r"it branches on the values or the shape of a tensor; use torch\.where"),
        (number, {}, r"it calls float\(\) on a tensor"),
        (own_tensor, {}, "it creates a tensor"),
        (by_length, {}, "it reads the attribute shape of a tensor"),
        (by_text, {}, "it reads texts_D of the batch, but the service evaluates one datum at a time"),
        (random, {}, "its operation rand_like"),
        (counted, {}, "the traced term has a different value or gradient"),
        (numpy_one, {}, "torch.fx cannot trace it"),
        (
            constant,
            {},
            "failed on a test batch .*'test_traced_constant' is declared differentiable, but its value does no",
        ),
        (prepared, {}, "it reads features that are prepared on the client"),
        (asynchronous, {}, "it is an async function"),
        ("confidence", {"execution": "process"}, "it has a separate process or a time limit"),
        ("confidence", {"timeout_s": 1.0}, "it has a separate process or a time limit"),
        ("confidence", {"on_error": "skip"}, "its on_error is 'skip', but a single pass cannot skip a term"),
        ("margin", {}, "its value is one number for the whole batch"),
        ("length", {}, "its estimator 'auto' compares the datums of a batch"),
        ("unlikely_repeats", {}, "it reads features that are prepared on the client"),
        ("unlikely_tokens", {"params": {"tokens": tuple(range(99))}}, "it creates a tensor"),
    ],
)
def test_terms_that_would_differ_on_the_service_raise(fn, fields, message):
    batch, outputs = cases()[1]
    with pytest.raises(UntraceableError, match=message):
        trace_term(bind(fn, **fields), outputs, batch)
