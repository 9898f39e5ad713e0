"""Gradient, linearization and documentation of every built-in term."""

from __future__ import annotations

import doctest
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from ragged_batches import SOLUTIONS, make_batch, several, with_policies
from test_evaluate import bind, evaluate, finite_differences

from objectives import Batch, Evaluation, Objective, ObjectiveError, Outputs, evaluate_base, linearize
from objectives.config.describe import parameters_of
from objectives.config.term_lookup import registered_terms

TERMS = {name: term for name, term in registered_terms().items() if term.evaluate.__module__.startswith("objectives.")}
PREFERENCES = {"dpo", "ipo", "simpo", "orpo", "bradley_terry", "kto"}
LABELLED = {"consistency", "margin", "equalized_loss", "worst_group", "demographic_parity", *PREFERENCES}

# Terms with every parameter choice that changes their formula.
CHOICES: list[tuple[str, dict[str, object]]] = [
    *[(name, {"of": of}) for name in ("l1", "l2", "elastic_net") for of in ("logprobs", "probabilities")],
    ("elastic_net", {"l1_ratio": 0.1}),
    *[("kl", {"estimator": e, "direction": d}) for e in ("k1", "k3") for d in ("reverse", "forward")],
    ("kl", {"direction": "symmetric"}),
    *[("kl_unweighted", {"estimator": e, "direction": d}) for e in ("k1", "k2", "k3") for d in ("reverse", "forward")],
    *[("kl_unweighted", {"estimator": estimator, "direction": "symmetric"}) for estimator in ("k2", "k3")],
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
    ("teacher_reverse_kl_topk", {}),
    *[("divergence_topk", {"kind": kind}) for kind in ("reverse", "forward", "symmetric", "jensen_shannon")],
    *[("label_divergence_topk", {"kind": kind}) for kind in ("forward", "jensen_shannon")],
]


def paired_case(seed: int = 0) -> tuple[Batch, Outputs]:
    """Two pairs of completions of equal length after different prompts, one unpaired datum, and two groups."""
    lengths = [4, 5, 3, 6, 6]
    masks = [False] * 2 + [True] * 2 + [False] * 3 + [True] * 2 + [True] * 3 + [True] * 3 + [False] * 3 + [True] * 6
    texts = ["<<2+2=5>>", "<<1+1=2>> <<7*2=14>> #### 14", "", *SOLUTIONS[:2]]
    batch, outputs = with_policies(*make_batch(lengths, masks=masks, texts=texts, seed=seed))
    labels_D = {
        "pair": torch.tensor([7, 7, 2, 2, -1]),
        "group": torch.tensor([0, 0, 1, 1, 1]),
        "desirable": torch.tensor([1, 0, 0, 1, 1]),
        "prompt": torch.tensor([0, 0, 1, 1, 1]),
    }
    return replace(batch, labels_D=labels_D), outputs


def test_every_built_in_term_is_covered():
    elsewhere = {"knowledge", "simulation"}  # covered by separate test files
    assert {name for name, _ in CHOICES + SEVERAL} == TERMS.keys() - elsewhere


@pytest.mark.parametrize(("name", "params"), [*CHOICES, *SEVERAL])
def test_the_gradient_matches_finite_differences(name, params):
    batch, outputs = paired_case() if (name, params) in CHOICES else several(*paired_case(), num_targets=3)
    bound = bind(name, params=params)
    evaluation = evaluate(bound, outputs, batch)
    slopes = finite_differences(bound, outputs, batch)
    assert evaluation.gradient_DT.flatten().tolist() == pytest.approx(slopes, abs=1e-7, rel=1e-6)
    assert evaluation.gradient_DT.any()
    assert not evaluation.gradient_DT[~batch.mask_DT].any()


def test_all_terms_linearize_together():
    batch, outputs = paired_case()
    entries = [{"name": f"{name}.{k}", "fn": name, "params": params} for k, (name, params) in enumerate(CHOICES)]
    objective = Objective(regularizers=entries)
    check_linear(objective, outputs, batch)
    batch, outputs = several(batch, outputs, num_targets=3)
    entries = [{"name": f"{name}.{k}", "fn": name, "params": params} for k, (name, params) in enumerate(SEVERAL)]
    check_linear(Objective(regularizers=entries), outputs, batch)


def check_linear(objective: Objective, outputs: Outputs, batch: Batch) -> None:
    terms: list[tuple[Evaluation, float]] = [
        (evaluate(regularizer, outputs, batch), 0.1 * k) for k, regularizer in enumerate(objective.regularizers)
    ]
    linear = linearize(evaluate_base(objective.base, outputs, batch), terms)
    expected = batch.weights_DT.double() - sum(weight * term.gradient_DT for term, weight in terms)
    torch.testing.assert_close(linear.loss_weights_DT, expected)
    names = [regularizer.name for regularizer in objective.regularizers]
    assert all(f"cosine/{a}/{b}" in linear.metrics for a, b in pairwise(names))


@pytest.mark.parametrize("name", sorted(TERMS))
def test_documentation_has_a_source_and_valid_examples(name):
    documentation = TERMS[name].evaluate.__doc__
    assert "Source" in documentation
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for example in doctest.DocTestFinder().find(TERMS[name].evaluate, globs=TERMS[name].evaluate.__globals__.copy()):
        assert runner.run(example).failed == 0


@pytest.mark.parametrize("name", ["negative_entropy_topk", "divergence_topk", "teacher_reverse_kl_topk"])
def test_topk_terms_require_several_targets(name):
    with pytest.raises(
        ObjectiveError, match=r"needs topk_logprobs, several targets per position, but the batch has one"
    ):
        evaluate(bind(name), paired_case()[1], paired_case()[0])


@pytest.mark.parametrize("name", sorted({name for name, _ in CHOICES}))
def test_single_target_terms_reject_several_targets(name):
    params = dict(CHOICES)[name]
    batch, outputs = several(*paired_case(), num_targets=24)  # K equals N, so a shape check alone would pass
    assert outputs.logprobs_DT.shape == (24, 24)
    with pytest.raises(ObjectiveError, match=r"24 targets|\(24, 24\)"):
        evaluate(bind(name, params=params), outputs, batch)


@pytest.mark.parametrize("name", sorted(LABELLED))
def test_missing_labels_raise_with_the_fix(name):
    batch, outputs = with_policies(*make_batch([2, 2]))
    with pytest.raises(ObjectiveError, match=r"the data has no label .*; write one integer under .label:"):
        evaluate(bind(name), outputs, batch)


@pytest.mark.parametrize("name", sorted(TERMS))
def test_every_parameter_has_a_description(name: str) -> None:
    assert [parameter.name for parameter in parameters_of(TERMS[name]) if not parameter.description] == []
