from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from objectives import Objective, ObjectiveError, ObjectiveSpec, RegularizerSpec, regularizer
from objectives.terms.token.confidence import sparsity


def test_a_spec_and_python_create_the_same_objective():
    text = """{"base_loss": "cross_entropy", "regularizers": [
        {"name": "topology", "weight": 0.1, "params": {"alpha": 2}},
        {"name": "l2", "fn": "sparsity", "weight": {"schedule": "linear", "start": 0, "end": 1}, "every": 2}]}"""
    spec = ObjectiveSpec.model_validate_json(text)
    assert ObjectiveSpec.model_validate_json(spec.model_dump_json()) == spec
    from_data = Objective.from_spec(spec)
    from_dicts = Objective(regularizers=json.loads(text)["regularizers"])
    assert from_data.regularizers == from_dicts.regularizers
    topology, l2 = from_data.regularizers
    assert topology.params["alpha"] == 2.0
    assert l2.term is sparsity
    assert [l2.weight_at(step, num_steps=3) for step in range(3)] == [0, 0.5, 1]
    assert [l2.due_at(step) for step in range(4)] == [True, False, True, False]


def test_terms_have_default_names_and_disabled_ones_are_skipped():
    objective = Objective(
        regularizers=[{"fn": sparsity, "weight": 0.1}, RegularizerSpec(name="logic", weight=1, enabled=False)]
    )
    assert [term.name for term in objective.regularizers] == ["sparsity"]


def test_a_monitor_has_no_weight():
    @regularizer("test_unweighted", "monitor")
    def unweighted(outputs, batch):
        return {}

    (bound,) = Objective(regularizers=[{"fn": unweighted, "weight": 3}]).regularizers
    assert bound.weight_at(0, num_steps=1) == 0


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "topology", "weight": -0.1}, "'weight' is -0.1, but input should be greater than or equal to 0"),
        ({"name": "topology", "weight": float("nan")}, "'weight' is nan, but input should be a finite number"),
        ({"name": "topology", "weight": {"schedule": "linear", "start": -1, "end": 0}}, "'weight.linear.start' is -1"),
        (
            {"name": "topology", "weight": {"schedule": "steps"}},
            "a number, or fields whose schedule is constant, linear, cosine or warmup",
        ),
        ({"name": "topology", "wieght": 1}, "'wieght': extra inputs are not permitted"),
        ({"name": "a/b", "fn": "topology"}, "'name' is 'a/b', but string should match pattern"),
        ({"name": "topology", "every": 0}, "'every' is 0"),
        (
            {"name": "topology", "on_error": "stop"},
            "'on_error' is 'stop', but input should be 'raise', 'skip' or 'last'",
        ),
        ({"name": "topology", "execution": "mpi"}, "'execution' is 'mpi', but input should be 'task_runner', 'inline'"),
        ({"name": "topology", "timeout_s": 0}, "'timeout_s' is 0, but input should be greater than 0"),
        (
            {"name": "topology", "execution": "inline", "timeout_s": 1},
            "the execution 'inline', which has no time limit",
        ),
        ({"name": "topology", "execution": "async"}, "has the execution 'async' but no async function"),
        ({"weight": 1}, "'name': field required"),
        ({"name": "topolgy"}, "No term is registered as 'topolgy'; did you mean 'topology'? The terms are "),
        (
            {"name": "mine", "fn": "topolgy"},
            "No term is registered as 'topolgy'; did you mean 'topology'? The terms are ",
        ),
        ({"name": "topology", "enabled": False, "params": {"beta": 1}}, "'beta': extra inputs are not permitted"),
        ({"name": "base", "fn": "topology"}, "The regularizer name 'base' is reserved for the base loss"),
        (sparsity, "not a RegularizerSpec or a dict of its fields"),
    ],
)
def test_an_invalid_regularizer_raises_one_sentence(entry, message):
    with pytest.raises(ObjectiveError) as error:
        Objective(regularizers=[entry])
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(".")


def test_duplicate_names_raise():
    with pytest.raises(ObjectiveError, match="regularizer name 'logic' is used twice; choose a unique `name`"):
        Objective(regularizers=[{"name": "logic"}, {"name": "logic", "fn": "topology"}])


@pytest.mark.parametrize(
    ("base_loss", "message"),
    [
        (
            "trpo",
            r"The base loss 'trpo' is unknown; use one of cross_entropy, .*, dapo, .*, a registered term, or a",
        ),
        (None, "The base loss None is wrong"),
        ({"name": "ppo", "parms": {}}, "'parms': extra inputs are not permitted"),
        ({"name": "ppo", "params": {"epsilon": 0.2}}, "The loss 'ppo' has no parameter 'epsilon'"),
        ({"name": "cross_entropy", "params": {"beta": 0.2}}, "The loss 'cross_entropy' has no parameter 'beta'"),
    ],
)
def test_an_unknown_base_loss_raises(base_loss, message):
    with pytest.raises(ObjectiveError, match=message):
        Objective(base_loss)


def test_a_term_as_base_loss_takes_parameters_that_are_no_numbers():
    kl = Objective({"name": "kl", "params": {"estimator": "k1", "direction": "forward"}}).base
    assert kl is not None
    assert kl.params == {"estimator": "k1", "direction": "forward"}
    with pytest.raises(ObjectiveError, match="The parameters of term 'kl' are wrong: 'estimator' is 'k9'"):
        Objective({"name": "kl", "params": {"estimator": "k9"}})
    of_text, of_number = (Objective({"name": "ppo", "params": {"clip_low_threshold": low}}) for low in ("9e-1", 0.9))
    assert of_text.base == of_number.base, "YAML reads 9e-1 as text"
    with pytest.raises(ObjectiveError, match="'clip_low_threshold' of the loss 'ppo' is inf"):
        Objective({"name": "ppo", "params": {"clip_low_threshold": float("inf")}})


def test_a_scored_term_as_base_loss_raises():
    from objectives.terms.text.logic import logic

    with pytest.raises(ObjectiveError, match="'logic' is a scored term; use a differentiable term"):
        Objective(logic)


def test_needs_that_no_service_provides_raise():
    @regularizer("test_hidden", needs=("hidden_states",))
    def hidden(outputs, batch):
        return outputs.logprobs_DT

    with pytest.raises(ObjectiveError, match="'test_hidden' needs hidden_states, which no Tinker service returns"):
        Objective(regularizers=[{"fn": hidden}])


def test_needs_that_a_flow_does_not_provide_raise_before_the_run():
    @regularizer("test_reference", needs=("ref_logprobs",))
    def reference(outputs, batch):
        return outputs.logprobs_DT - outputs.ref_logprobs_DT

    objective = Objective(regularizers=[{"fn": reference}])
    objective.check_needs({"ref_logprobs"})
    with pytest.raises(
        ObjectiveError,
        match="'test_reference' needs ref_logprobs, but this flow provides only the logprobs and no other input",
    ):
        objective.check_needs()


def test_monitors_and_terms_without_a_weight_train_nothing():
    @regularizer("test_silent", "monitor")
    def silent(outputs, batch):
        return {"least": outputs.logprobs_DT.min()}

    trained = {"name": "confidence", "weight": {"schedule": "linear", "start": 0.0, "end": 1.0}, "every": 2}
    for terms, expected in (
        ([{"fn": silent}, {"name": "l2", "weight": 0.0}], [False] * 4),
        ([{"fn": silent}, trained], [False, False, True, False]),
    ):
        objective = Objective(regularizers=terms)
        assert [objective.trains_terms(step, 4) for step in range(4)] == expected
        assert objective.due(0)


def test_the_score_function_on_fixed_data_raises_before_the_run():
    @regularizer("test_reinforced", "scored", estimator="score_function")
    def reinforced(outputs, batch):
        return [0.0] * batch.num_datums

    objective = Objective(regularizers=[{"fn": reinforced}])
    objective.check_needs({"sampling_logprobs"})
    with pytest.raises(ObjectiveError, match="use 'auto', 'minimum_risk' or 'unlikelihood'"):
        objective.check_needs()


def test_every_field_of_the_form_is_described():
    for model in (ObjectiveSpec, RegularizerSpec):
        assert all(field.description for field in model.model_fields.values())
    with pytest.raises(ValidationError):
        ObjectiveSpec.model_validate({"regularisers": []})
