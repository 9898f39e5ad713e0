from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import pytest
from pydantic import Field
from ragged_batches import make_batch

from objectives import Objective, evaluate_term
from objectives.config.describe import first_line
from objectives.config.term_lookup import find_term
from objectives.errors import ObjectiveError
from objectives.term import Term, check_params, own_params, regularizer

if TYPE_CHECKING:
    from objectives.batch import Batch


def test_a_term_is_called_like_its_function_and_found_by_name():
    @regularizer("test_called", "monitor")
    def called(outputs, batch, *, factor: int = 3):
        return {"product": outputs * batch * factor}

    assert isinstance(called, Term)
    assert called(2, 5) == {"product": 30}
    assert find_term("test_called") is called


def test_the_built_in_terms_need_no_import():
    kinds = {name: find_term(name).kind for name in ("topology", "logic", "confidence", "sparsity")}
    assert kinds == {
        "topology": "scored",
        "logic": "scored",
        "confidence": "differentiable",
        "sparsity": "differentiable",
    }


def test_parameters_are_collected_from_all_functions_and_passed_to_each():
    def look_up(batch: Batch, *, limit: Annotated[int, Field(ge=1)] = 5):
        return limit

    @regularizer("test_params", "scored", prepare=look_up)
    def scores(outputs, batch: Batch, *, name: str):
        return name

    params = check_params(scores, {"name": "n", "alpha": 2})
    assert params == {"name": "n", "limit": 5, "alpha": 2.0}
    assert own_params(look_up, params) == {"limit": 5}
    assert own_params(scores.evaluate, params) == {"name": "n"}
    for wrong, message in [
        ({}, "'name': field required"),
        ({"name": "n", "limit": 0}, "'limit' is 0, but input should be greater than or equal to 1"),
        (
            {"name": "n", "limits": 1},
            r"'limits': extra inputs are not permitted \(its parameters: name, limit, alpha\)",
        ),
        ({"name": "n", "alpha": "much"}, "'alpha' is 'much', but input should be a valid number"),
    ]:
        with pytest.raises(ObjectiveError, match=f"The parameters of term 'test_params' are wrong: {message}"):
            check_params(scores, wrong)


def test_a_parameter_that_is_not_keyword_only_is_explained():
    @regularizer("test_positional", "scored")
    def scores(outputs, batch, limit=4.0):
        return limit

    with pytest.raises(ObjectiveError, match=r"parameters: alpha\); write \* before 'limit' in the function, as in"):
        check_params(scores, {"limit": 2})
    with pytest.raises(ObjectiveError, match=r"'batch': extra inputs are not permitted \(its parameters: alpha\)\.$"):
        check_params(scores, {"batch": 2})


def test_conflicting_parameter_declarations_raise():
    def look_up(batch, *, limit: int = 5):
        return limit

    with pytest.raises(ObjectiveError, match="declare the parameter 'limit' with different types or defaults"):

        @regularizer("test_disagree", "scored", prepare=look_up)
        def scores(outputs, batch, *, limit: int = 6):
            return limit


def test_unknown_names_list_the_known_ones():
    with pytest.raises(
        ObjectiveError, match=r"'topolgy'; did you mean 'topology'.*confidence.*logic.*sparsity.*topology"
    ):
        find_term("topolgy")


@pytest.mark.parametrize(
    "declaration",
    [{"kind": "magic"}, {"reduction": "mean"}, {"estimator": "reinforce"}, {"needs": ("hidden_state",)}],
)
def test_unknown_declarations_list_the_known_ones(declaration):
    with pytest.raises(ObjectiveError, match=r"Term 'test_wrong' declares the .*; use one of "):
        regularizer("test_wrong", **declaration)


def test_a_name_is_unique_but_its_definition_may_run_again():
    def define():
        @regularizer("test_again", "monitor")
        def first(outputs, batch):
            return {}

        return first

    define()
    again = define()
    assert find_term("test_again") is again
    with pytest.raises(ObjectiveError, match=r"'test_again' of .*other is already registered by .*first"):

        @regularizer("test_again", "monitor")
        def other(outputs, batch):
            return {}


def scaled_surprise(outputs, batch, *, scale: float, power: int = 2):
    """Surprise to a power."""
    return scale * outputs.logprobs_DT**power


def test_a_partial_is_a_term_with_the_parameters_of_its_function():
    term = regularizer("test_partial_surprise")(partial(scaled_surprise, scale=3.0))
    assert check_params(term, {"power": 1}) == {"scale": 3.0, "power": 1}
    assert first_line(term) == "Surprise to a power."
    batch, outputs = make_batch([2])
    (bound,) = Objective(regularizers=[{"fn": term}]).regularizers
    evaluation = evaluate_term(bound, outputs, batch, first_step=True)
    assert evaluation.value == pytest.approx(3.0 * (outputs.logprobs_DT**2).mean().item())
    with pytest.raises(
        ObjectiveError, match=r"functools\.partial of test_term\.scaled_surprise, which does not name the"
    ):
        Objective(regularizers=[{"fn": term, "execution": "process"}])


def test_partials_with_other_arguments_are_other_terms():
    regularizer("test_two_partials")(partial(scaled_surprise, scale=1.0))
    regularizer("test_two_partials")(partial(scaled_surprise, scale=1.0))  # running a cell again
    with pytest.raises(ObjectiveError, match="already registered"):
        regularizer("test_two_partials")(partial(scaled_surprise, scale=2.0))
