"""Every built-in term: its gradient, its place in a linear loss, its documentation."""

from __future__ import annotations

import doctest
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from ragged_batches import SOLUTIONS, make_batch, several, with_policies
from test_evaluate import bind, evaluate, finite_differences

from objectives import Batch, Evaluation, Objective, ObjectiveError, Outputs, evaluate_base, linearize
from objectives.find_term import registered_terms

TERMS = {name: term for name, term in registered_terms().items() if term.evaluate.__module__.startswith("objectives.")}
PREFERENCES = {"dpo", "ipo", "simpo", "orpo", "bradley_terry", "kto"}
LABELLED = {"consistency", "margin", "equalized_loss", "worst_group", "demographic_parity", *PREFERENCES}

# A term under every choice that changes its formula.
CHOICES: list[tuple[str, dict[str, object]]] = [
    *[(name, {"of": of}) for name in ("l1", "l2", "elastic_net") for of in ("logprobs", "probabilities")],
    ("elastic_net", {"l1_ratio": 0.1}),
    *[("kl", {"estimator": e, "direction": d}) for e in ("k1", "k2", "k3") for d in ("reverse", "forward")],
    *[("kl", {"estimator": estimator, "direction": "symmetric"}) for estimator in ("k2", "k3")],
    ("negative_entropy", {}),
    ("confidence", {}),
    ("sparsity", {}),
    ("magnitude", {"limit": 1.0}),
    ("orthogonality", {}),
    *[("consistency", {"measure": measure}) for measure in ("mse", "l1", "cosine", "kl", "mean")],
    ("margin", {"margin": 3.0}),
    ("equalized_loss", {}),
    ("worst_group", {}),
    ("demographic_parity", {}),
    *[(name, {}) for name in sorted(PREFERENCES)],
    ("dpo", {"beta": 1.0}),
    ("simpo", {"beta": 0.5, "gamma": 0.0}),
    ("orpo", {"odds_weight": 2.0}),
    ("kto", {"beta": 0.5, "undesirable_weight": 3.0}),
    ("length", {"free": 2, "buffer": 3}),
    ("repetition", {"n": 1}),
    ("unlikely_tokens", {"tokens": [1, 2]}),
    ("unlikely_repeats", {"n": 1}),
    ("logic", {}),
    ("topology", {}),
]
SEVERAL: list[tuple[str, dict[str, object]]] = [
    ("negative_entropy_topk", {}),
    *[("divergence_topk", {"kind": kind}) for kind in ("reverse", "forward", "symmetric", "jensen_shannon")],
]


def paired_case(seed: int = 0) -> tuple[Batch, Outputs]:
    """Two pairs of equal answers after prompts of different lengths, and a datum without a partner; two groups."""
    lengths = [4, 5, 3, 6, 6]
    masks = [False] * 2 + [True] * 2 + [False] * 3 + [True] * 2 + [True] * 3 + [True] * 3 + [False] * 3 + [True] * 6
    texts = ["<<2+2=5>>", "<<1+1=2>> <<7*2=14>> #### 14", "", *SOLUTIONS[:2]]
    batch, outputs = with_policies(*make_batch(lengths, masks=masks, texts=texts, seed=seed))
    labels_D = {
        "pair": torch.tensor([7, 7, 2, 2, -1]),
        "group": torch.tensor([0, 0, 1, 1, 1]),
        "desirable": torch.tensor([1, 0, 0, 1, 1]),
    }
    return replace(batch, labels_D=labels_D), outputs


def test_every_built_in_term_is_tried():
    elsewhere = {"knowledge", "simulation"}  # they have a test file of their own
    assert {name for name, _ in CHOICES + SEVERAL} == TERMS.keys() - elsewhere


@pytest.mark.parametrize(("name", "params"), [*CHOICES, *SEVERAL])
def test_the_gradient_is_that_of_the_value(name, params):
    batch, outputs = paired_case() if (name, params) in CHOICES else several(*paired_case(), num_targets=3)
    bound = bind(name, params=params)
    evaluation = evaluate(bound, outputs, batch)
    slopes = finite_differences(bound, outputs, batch)
    assert evaluation.gradient_DT.flatten().tolist() == pytest.approx(slopes, abs=1e-7, rel=1e-6)
    assert evaluation.gradient_DT.any()
    assert not evaluation.gradient_DT[~batch.mask_DT].any()


def test_all_of_them_make_one_linear_loss():
    batch, outputs = paired_case()
    entries = [{"name": f"{name}.{k}", "fn": name, "params": params} for k, (name, params) in enumerate(CHOICES)]
    objective = Objective(regularizers=entries)
    check_linear(objective, outputs, batch)
    batch, outputs = several(batch, outputs, num_targets=3)
    entries = [{"name": f"{name}.{k}", "fn": name, "params": params} for k, (name, params) in enumerate(SEVERAL)]
    check_linear(Objective(regularizers=entries), outputs, batch)


def check_linear(objective: Objective, outputs: Outputs, batch: Batch) -> None:
    terms: list[tuple[Evaluation, float]] = [
        (evaluate(each, outputs, batch), 0.1 * k) for k, each in enumerate(objective.regularizers)
    ]
    linear = linearize(evaluate_base(objective, outputs, batch), terms)
    expected = batch.weights_DT.double() - sum(weight * term.gradient_DT for term, weight in terms)
    torch.testing.assert_close(linear.loss_weights_DT, expected)
    names = [each.name for each in objective.regularizers]
    assert all(f"cosine/{a}/{b}" in linear.metrics for a, b in pairwise(names))


@pytest.mark.parametrize("name", sorted(TERMS))
def test_its_documentation_has_a_source_and_holds(name):
    documentation = TERMS[name].evaluate.__doc__
    assert "Source" in documentation
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in doctest.DocTestFinder().find(TERMS[name].evaluate, globs=TERMS[name].evaluate.__globals__.copy()):
        assert runner.run(example).failed == 0


@pytest.mark.parametrize("name", ["negative_entropy_topk", "divergence_topk"])
def test_full_forms_say_that_they_need_several_targets(name):
    with pytest.raises(
        ObjectiveError, match=r"needs topk_logprobs, several targets at each position, and this batch has"
    ):
        evaluate(bind(name), paired_case()[1], paired_case()[0])


@pytest.mark.parametrize("name", sorted({name for name, _ in CHOICES}))
def test_terms_of_one_target_refuse_several(name):
    params = dict(CHOICES)[name]
    batch, outputs = several(*paired_case(), num_targets=24)  # as many targets as tokens: nothing else would notice
    assert outputs.logprobs_DT.shape == (24, 24)
    with pytest.raises(ObjectiveError, match=r"several|\(24, 24\)"):
        evaluate(bind(name, params=params), outputs, batch)


@pytest.mark.parametrize("name", sorted(LABELLED))
def test_terms_of_labels_say_how_the_data_gives_them(name):
    batch, outputs = with_policies(*make_batch([2, 2]))
    with pytest.raises(
        ObjectiveError, match=r"the data has none: let the dataset write one whole number under 'label:"
    ):
        evaluate(bind(name), outputs, batch)
