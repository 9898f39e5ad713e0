"""Terms on ragged batches, compared with reference implementations in plain loops."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise
from statistics import fmean

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from ragged_batches import datums, make_batch, ragged, several, with_policies
from test_evaluate import bind, evaluate

from objectives import Batch, ObjectiveError, Outputs

JUST = {"abs": 1e-9, "rel": 1e-9}


@st.composite
def ragged_groups(draw: st.DrawFn) -> tuple[Batch, Outputs, list[int]]:
    """Ragged batches with group labels -1 to 2."""
    batch, outputs = draw(ragged())
    labels = draw(st.lists(st.integers(-1, 2), min_size=batch.num_datums, max_size=batch.num_datums))
    return replace(batch, labels_D={"group": torch.tensor(labels)}), outputs, labels


@st.composite
def ragged_pairs(draw: st.DrawFn) -> tuple[Batch, Outputs, list[tuple[int, int]]]:
    """Shuffled pairs of completions of equal length after prompts of any length, and unpaired datums."""
    answers = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    unpaired_lengths = draw(st.lists(st.integers(0, 3), max_size=2))
    rows = [(pair, length) for pair, length in enumerate(answers) for _ in range(2)] + [
        (-1, length) for length in unpaired_lengths
    ]
    rows = draw(st.permutations(rows))
    prompts = draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    masks = [flag for prompt, (_, length) in zip(prompts, rows, strict=True) for flag in (prompt, length)]
    flags = [kind for k, count in enumerate(masks) for kind in [bool(k % 2)] * count]
    lengths = [prompt + length for prompt, (_, length) in zip(prompts, rows, strict=True)]
    batch, outputs = make_batch(lengths, masks=flags, seed=draw(st.integers(0, 2**16)))
    labels = [label for label, _ in rows]
    places = [tuple(d for d, label in enumerate(labels) if label == pair) for pair in range(len(answers))]
    return replace(batch, labels_D={"pair": torch.tensor(labels)}), outputs, places


def trained(values_DT: torch.Tensor, batch: Batch) -> list[float]:
    return [value for row in datums(values_DT, batch) for value in row]


@given(ragged(), st.sampled_from(["logprobs", "probabilities"]), st.floats(0, 1))
def test_norms(case, of, ratio):
    batch, outputs = case
    values = [x if of == "logprobs" else math.exp(x) for x in trained(outputs.logprobs_DT, batch)]
    first, second = fmean(abs(x) for x in values), fmean(x * x for x in values)
    for name, params, expected in [
        ("l1", {}, first),
        ("l2", {}, second),
        ("elastic_net", {"l1_ratio": ratio}, ratio * first + (1 - ratio) / 2 * second),
    ]:
        assert evaluate(bind(name, params={"of": of, **params}), outputs, batch).value == pytest.approx(
            expected, **JUST
        )


KL = {
    ("k1", "reverse"): lambda p, q: math.log(p / q),
    ("k1", "forward"): lambda p, q: math.log(q / p),
    ("k2", "reverse"): lambda p, q: math.log(p / q) ** 2 / 2,
    ("k2", "forward"): lambda p, q: math.log(p / q) ** 2 / 2,
    ("k2", "symmetric"): lambda p, q: math.log(p / q) ** 2 / 2,
    ("k3", "reverse"): lambda p, q: q / p - 1 - math.log(q / p),
    ("k3", "forward"): lambda p, q: p / q - 1 - math.log(p / q),
    ("k3", "symmetric"): lambda p, q: (p / q + q / p) / 2 - 1,
}


@given(ragged())
@pytest.mark.parametrize("which", KL, ids="-".join)
def test_kl_estimates(which, case):
    batch, outputs = with_policies(*case)
    p, q = (
        map(math.exp, trained(logprobs_DT, batch)) for logprobs_DT in (outputs.logprobs_DT, outputs.ref_logprobs_DT)
    )
    expected = fmean(map(KL[which], p, q))
    bound = bind("kl_unweighted", params=dict(zip(("estimator", "direction"), which, strict=True)))
    assert evaluate(bound, outputs, batch).value == pytest.approx(expected, **JUST)


@given(ragged())
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_kl_on_samples_weights_each_token_by_the_ratio_of_its_completion_so_far(direction, case):
    batch, outputs = with_policies(*case)
    policy, reference, sampler, mask = (
        values_DT.tolist()
        for values_DT in (
            outputs.logprobs_DT,
            outputs.ref_logprobs_DT,
            outputs.sampling_logprobs_DT,
            batch.mask_DT,
        )
    )
    values = []
    for start, end in pairwise(batch.offsets_D.tolist()):
        weight = 1.0
        for i in range(start, end):
            if mask[i]:
                numerator = policy if direction == "reverse" else reference
                weight *= math.exp(numerator[i] - sampler[i])
                values.append(weight * KL["k3", direction](math.exp(policy[i]), math.exp(reference[i])))
    bound = bind("kl", params={"direction": direction})
    assert evaluate(bound, outputs, batch).value == pytest.approx(fmean(values), **JUST)


def test_k2_on_samples_raises():
    batch, outputs = with_policies(*make_batch([3]))
    with pytest.raises(ObjectiveError, match=r"no unbiased form on samples; set it to 'k3', or use .* 'kl_unweighted'"):
        evaluate(bind("kl", params={"estimator": "k2"}), outputs, batch)


@pytest.mark.parametrize(("direction", "samples_of"), [("reverse", 0), ("forward", 1)])
def test_kl_estimates_are_unbiased(direction, samples_of):
    """Exact expectation over a vocabulary of four tokens, weighted by the sampling model's probabilities."""
    p, q = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64).log()
    batch, _ = make_batch([4])
    counts = (p, q)[samples_of].exp()
    exact = (counts * ((p - q) if direction == "reverse" else (q - p))).sum().item()
    outputs = Outputs(p, ref_logprobs_DT=q)
    for estimator in ("k1", "k3"):
        values_DT, _ = bind("kl_unweighted").term(outputs, batch, estimator=estimator, direction=direction)
        assert (counts * values_DT).sum().item() == pytest.approx(exact)


def test_the_sampled_entropy_has_an_unbiased_gradient():
    logits = torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    logprobs = logits.log_softmax(0)
    batch, _ = make_batch([4])
    values_DT, _ = bind("negative_entropy").term(Outputs(logprobs, sampling_logprobs_DT=behaviour.log()), batch)
    estimate, exact = (behaviour * values_DT).sum(), (logprobs.exp() * logprobs).sum()
    assert estimate.item() == pytest.approx(exact.item())
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (estimate, exact)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(("name", "on_samples"), [("kl", False), ("kl_unweighted", True)])
def test_symmetric_k1_without_importance_ratios_raises(name, on_samples):
    batch, outputs = with_policies(*make_batch([3]))
    if not on_samples:
        outputs = replace(outputs, sampling_logprobs_DT=None)
    with pytest.raises(ObjectiveError, match="'k1' is 0 for direction 'symmetric'; set estimator to 'k2' or 'k3'"):
        evaluate(bind(name, params={"estimator": "k1", "direction": "symmetric"}), outputs, batch)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("direction", ["reverse", "forward", "symmetric"])
def test_kl_on_samples_is_finite_far_from_the_reference(direction, estimator):
    """In float32 as in float64, where no exponential overflows."""
    batch, _ = make_batch([4])
    logprobs = torch.tensor([-1.0, -95.0, -2.0, -23.0])
    reference, sampler = torch.tensor([-1.0, -2.0, -24.0, -1.5]), torch.tensor([-1.0, -3.0, -22.0, -21.0])
    values = []
    for dtype in (torch.float32, torch.float64):
        leaf = logprobs.to(dtype).requires_grad_()
        outputs = Outputs(leaf, ref_logprobs_DT=reference.to(dtype), sampling_logprobs_DT=sampler.to(dtype))
        params = {"estimator": estimator, "direction": direction}
        value_DT = bind("kl", params=params).term(outputs, batch, **params)[0]
        values.append(torch.stack([value_DT, torch.autograd.grad(value_DT.sum(), leaf)[0]]).double())
    assert values[0].isfinite().all()
    torch.testing.assert_close(*values, rtol=1e-4, atol=1e-6)


def test_extreme_prompt_logprobs_have_no_gradient():
    batch, outputs = make_batch([3], masks=[False, True, True])
    outputs = Outputs(torch.tensor([-2000.0, -1.0, -2.0]), torch.full((3,), -1.0), torch.full((3,), -1.0))
    for name in ("kl", "negative_entropy"):
        assert evaluate(bind(name), outputs, batch).gradient_DT[0] == 0


@given(ragged(), st.integers(1, 4))
def test_entropy_and_divergences_over_several_targets(case, num_targets):
    batch, outputs = several(*case, num_targets=num_targets)
    positions = batch.mask_DT.nonzero()[:, 0].tolist()

    def rows(logprobs_DTK):
        listed = [[math.exp(x) for x in logprobs_DTK[i].tolist()] for i in positions]
        return [[*row, 1 - sum(row)] for row in listed]

    def kl(p, q):
        return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))

    def shannon(p, q):
        middle = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
        return (kl(p, middle) + kl(q, middle)) / 2

    policy, reference = rows(outputs.logprobs_DT), rows(outputs.ref_logprobs_DT)
    both = list(zip(policy, reference, strict=True))
    expected = {
        "reverse": fmean(kl(p, q) for p, q in both),
        "forward": fmean(kl(q, p) for p, q in both),
        "symmetric": fmean((kl(p, q) + kl(q, p)) / 2 for p, q in both),
        "jensen_shannon": fmean(shannon(p, q) for p, q in both),
    }
    for kind, value in expected.items():
        evaluation = evaluate(bind("divergence_topk", params={"kind": kind}), outputs, batch)
        assert evaluation.value == pytest.approx(value, abs=1e-9)
    entropy = evaluate(bind("negative_entropy_topk"), outputs, batch)
    assert entropy.value == pytest.approx(fmean(sum(a * math.log(a) for a in p) for p in policy))
    assert entropy.metrics["rest"] == pytest.approx(fmean(p[-1] for p in policy))


@given(ragged_pairs())
@pytest.mark.parametrize("measure", ["mse", "l1", "kl", "cosine", "mean"])
def test_consistency_of_pairs(measure, case):
    batch, outputs, places = case
    rows = datums(outputs.logprobs_DT, batch)

    def distance(a, b):
        if measure == "mean":
            return (fmean(a) - fmean(b)) ** 2
        if measure == "cosine":
            return 1 - sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)
        return fmean(token(x, y) for x, y in zip(a, b, strict=True))

    def token(x, y):
        p, q = math.exp(x), math.exp(y)
        jeffreys = (p - q) * (math.log(p / (1 - p)) - math.log(q / (1 - q)))
        return {"mse": (x - y) ** 2, "l1": abs(x - y), "kl": jeffreys / 2}[measure]

    term = bind("consistency").term
    value, metrics = term(outputs, batch, measure=measure)
    assert value.item() == pytest.approx(fmean(distance(rows[a], rows[b]) for a, b in places), abs=1e-9)
    assert metrics["gap"] == pytest.approx(fmean(abs(fmean(rows[a]) - fmean(rows[b])) for a, b in places))


@pytest.mark.parametrize("scale", [1.0, 2e-4, 1e-5])
def test_the_cosine_of_confident_completions(scale):
    """Logprobs of one profile have distance 0, however close to 0 they are; other ones compare with torch's cosine."""
    batch, _ = make_batch([3, 3])
    batch = replace(batch, labels_D={"pair": torch.tensor([0, 0])})
    term = bind("consistency", params={"measure": "cosine"})
    profile = -scale * torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    same = evaluate(term, Outputs(torch.cat([profile, 2 * profile])), batch)
    assert same.value == pytest.approx(0, abs=1e-9)
    assert (scale * same.gradient_DT).abs().max() < 1e-9
    logprobs_DT = torch.cat([profile, profile.flip(0)]).requires_grad_()
    other = evaluate(term, Outputs(logprobs_DT.detach()), batch)
    distance = 1 - torch.nn.functional.cosine_similarity(logprobs_DT[:3], logprobs_DT[3:], dim=0, eps=1e-30)
    distance.backward()
    assert other.value == pytest.approx(distance.item())
    assert other.gradient_DT.tolist() == pytest.approx(logprobs_DT.grad.tolist())
    certain = evaluate(term, Outputs(torch.cat([profile, torch.zeros(3, dtype=torch.float64)])), batch)
    assert certain.value == 1.0
    assert certain.gradient_DT.isfinite().all()


@given(ragged_pairs(), st.floats(0, 4))
def test_margin_of_pairs(case, target):
    batch, outputs, places = case
    rows = datums(outputs.logprobs_DT, batch)
    gaps = [fmean(rows[first]) - fmean(rows[second]) for first, second in places]
    value, metrics = bind("margin").term(outputs, batch, margin=target)
    assert value.item() == pytest.approx(fmean(max(0, target - gap) for gap in gaps), abs=1e-9)
    assert metrics["gap"] == pytest.approx(fmean(gaps))


def test_a_margin_met_at_the_first_step_is_not_mistaken_for_a_constant():
    batch, _ = make_batch([1, 1])
    batch = replace(batch, labels_D={"pair": torch.tensor([1, 1])})
    evaluation = evaluate(bind("margin"), Outputs(torch.tensor([-1.0, -9.0])), batch)
    assert (evaluation.value, evaluation.metrics["kept"]) == (0.0, 1.0)


def test_pairs_of_different_lengths_allow_only_the_measure_mean():
    batch, outputs = make_batch([2, 3])
    batch = replace(batch, labels_D={"pair": torch.tensor([4, 4])})
    with pytest.raises(ObjectiveError, match="a pair 'pair' has 2 and 3 trained tokens, but measure 'mse'"):
        evaluate(bind("consistency"), outputs, batch)
    assert evaluate(bind("consistency", params={"measure": "mean"}), outputs, batch).gradient_DT.all()


@given(ragged_groups())
def test_fairness_between_groups(case):
    batch, outputs, labels = case
    rows = datums(outputs.logprobs_DT, batch)
    groups = {
        group: [row for row, label in zip(rows, labels, strict=True) if label == group and row] for group in (0, 1, 2)
    }
    groups = {group: members for group, members in groups.items() if members}
    assume(len(groups) > 1)
    losses = {group: fmean(-fmean(row) for row in members) for group, members in groups.items()}
    rates = {group: fmean(math.exp(sum(row)) for row in members) for group, members in groups.items()}
    for name, expected, (prefix, values) in [
        ("equalized_loss", max(losses.values()) - min(losses.values()), ("loss", losses)),
        ("worst_group", max(losses.values()), ("loss", losses)),
        ("demographic_parity", max(rates.values()) - min(rates.values()), ("rate", rates)),
    ]:
        evaluation = evaluate(bind(name), outputs, batch)
        assert evaluation.value == pytest.approx(expected, **JUST)
        assert evaluation.metrics == pytest.approx({f"{prefix}_{group}": value for group, value in values.items()})


def test_a_gap_needs_two_groups():
    batch, outputs = make_batch([2, 2])
    batch = replace(batch, labels_D={"group": torch.tensor([1, 1])})
    with pytest.raises(ObjectiveError, match="all trained datums with the label 'group' are in one group"):
        evaluate(bind("equalized_loss"), outputs, batch)
    metrics = evaluate(bind("worst_group", params={"names": ["one", "other"]}), outputs, batch).metrics
    assert list(metrics) == ["loss_other"]
    unlabelled = replace(batch, labels_D={"group": torch.tensor([-1, -1])})
    with pytest.raises(ObjectiveError, match="no datum of the batch has both a label 'group' and a trained token"):
        evaluate(bind("worst_group"), outputs, unlabelled)


@given(ragged())
def test_orthogonality_of_sequences(case):
    batch, outputs = with_policies(*case)
    tokens = datums(batch.target_tokens_DT, batch)
    rows = [
        [(token, math.exp(x)) for token, x in zip(*pair, strict=True)]
        for pair in zip(tokens, datums(outputs.logprobs_DT, batch), strict=True)
        if pair[0]
    ]
    assume(len(rows) > 1)
    vectors = []
    for row in rows:
        vector: Counter[float] = Counter()
        for token, probability in row:
            vector[token] += probability
        vectors.append(vector)

    def cosine(a, b):
        return sum(a[token] * b[token] for token in a) / math.hypot(*a.values()) / math.hypot(*b.values())

    cosines = [cosine(a, b) for a, b in combinations(vectors, 2)]
    value, metrics = bind("orthogonality").term(outputs, batch)
    assert value.item() == pytest.approx(fmean(value_**2 for value_ in cosines), abs=1e-9)
    assert metrics == pytest.approx({"cosine_mean": fmean(cosines), "cosine_max": max(cosines)}, abs=1e-9)


@pytest.mark.parametrize("logprob", [-1.0, -16.0, -100.0])
def test_equal_sequences_are_parallel_at_any_probability(logprob):
    batch, _ = make_batch([2, 2])
    batch = replace(batch, target_tokens_DT=torch.tensor([1, 2, 1, 2]))
    assert evaluate(bind("orthogonality"), Outputs(torch.full((4,), logprob)), batch).value == pytest.approx(1)


def test_sequences_without_a_common_token_are_orthogonal():
    batch, outputs = make_batch([2, 2])
    batch = replace(batch, target_tokens_DT=torch.tensor([1, 2, 3, 4]))
    evaluation = evaluate(bind("orthogonality"), outputs, batch)
    assert (evaluation.value, evaluation.gradient_DT.any()) == (0.0, False)


def test_orthogonality_needs_two_sequences():
    with pytest.raises(ObjectiveError, match="a pair needs two; use larger batches"):
        evaluate(bind("orthogonality"), *reversed(make_batch([3])))


@given(ragged(), st.floats(0, 5))
def test_magnitude(case, limit):
    batch, outputs = case
    values = trained(outputs.logprobs_DT, batch)
    value_DT, metrics = bind("magnitude").term(outputs, batch, limit=limit)
    assert trained(value_DT, batch) == pytest.approx([max(0, -x - limit) ** 2 for x in values])
    assert metrics["size_max"] == pytest.approx(max(-x for x in values))


@given(ragged(), st.integers(0, 5), st.integers(1, 5))
def test_length(case, free, buffer):
    batch, outputs = case
    lengths = [len(row) for row in datums(outputs.logprobs_DT, batch)]
    scores_D, metrics = bind("length").term(outputs, batch, free=free, buffer=buffer)
    assert scores_D.tolist() == pytest.approx([min(1, max(0, (length - free) / buffer)) for length in lengths])
    assert metrics["tokens_max"] == max(lengths)


@given(ragged(), st.integers(1, 3))
def test_repetition_and_unlikely_repeats(case, n):
    batch, outputs = with_policies(*case)
    rows = datums(batch.target_tokens_DT, batch)
    ngrams = [[tuple(row[start : start + n]) for start in range(len(row) - n + 1)] for row in rows]
    shares = [1 - len(set(row_ngrams)) / len(row_ngrams) if row_ngrams else 0.0 for row_ngrams in ngrams]
    evaluation = evaluate(bind("repetition", params={"n": n}), outputs, batch)
    assert evaluation.metrics["repeated_mean"] == pytest.approx(fmean(shares))
    assert evaluation.metrics["repeated_max"] == pytest.approx(max(shares))
    again = sum(ngram in row_ngrams[:place] for row_ngrams in ngrams for place, ngram in enumerate(row_ngrams))
    flagged = evaluate(bind("unlikely_repeats", params={"n": n}), outputs, batch)
    assert flagged.metrics["flagged"] == pytest.approx(again / sum(map(len, rows)))
    assert (flagged.gradient_DT >= 0).all()
    assert int((flagged.gradient_DT > 0).sum()) == again


def test_unlikely_tokens_lowers_only_the_given_tokens():
    batch, outputs = with_policies(*make_batch([6, 6], masks=[True] * 10 + [False] * 2))
    evaluation = evaluate(bind("unlikely_tokens", params={"tokens": [1, 3]}), outputs, batch)
    unwanted = torch.isin(batch.target_tokens_DT, torch.tensor([1, 3])) & batch.mask_DT
    assert torch.equal(evaluation.gradient_DT > 0, unwanted)
    assert evaluation.metrics["flagged"] == pytest.approx(int(unwanted.sum()) / 10)
    with pytest.raises(ObjectiveError, match="'tokens' is"):
        bind("unlikely_tokens", params={"tokens": []})
