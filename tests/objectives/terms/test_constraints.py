"""Constraints of a datum: limits of their text, and counts that agree with enumeration."""

from __future__ import annotations

import itertools
import linecache
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
import tinker
import torch
import z3
from hypothesis import given
from hypothesis import strategies as st
from ragged_batches import make_batch
from test_evaluate import bind

from objectives import Batch, Objective, ObjectiveError, ObjectiveSpec, prepare_features
from objectives.feature_cache import FeatureCache
from objectives.labels import with_labels, without_labels
from objectives.sdk.training_loop import pack_data
from objectives.terms.text.constraints import (
    MAX_CHARS,
    Checked,
    Values,
    check_values,
    group_values,
    parse_constraints,
)
from objectives.terms.text.extractors import read_assignments

NAMES = "(declare-const x Int)(declare-const y Int)(declare-const z Real)"


def check(text: str, values: Values) -> Checked:
    context = z3.Context()
    return check_values(parse_constraints(text, context), values, context)


@pytest.mark.parametrize(
    ("constraint", "values", "violated"),
    [
        ("(> x 1)", {"x": 2}, 0),
        ("(> x 1)", {"x": 1}, 1),
        ("(> x 1)", {"x": Decimal("2.0")}, 0),
        ("(> x 1)", {"x": 2.5}, 1),  # no integer
        ("(= z 0.1)", {"z": 0.1}, 0),
        ("(= z (/ 1 3))", {"z": Fraction(1, 3)}, 0),
        ("(> z 1.0)", {"z": float("inf")}, 1),
        ("(> x 1)", {"x": 10**400}, 1),
        ("(> x 1)", {"x": "2"}, 1),
        ("(> x 1)", {"x": True}, 1),
        ("(> x 1)", [("x", 2), ("x", 2.0)], 0),
        ("(> x 1)", [("x", 2), ("x", 3)], 1),
        ("(= (/ x y) 5.0)", {"x": 5, "y": 1}, 0),
        ("(= (/ x y) 5.0)", {"x": 5, "y": 0}, 1),
        ("(or (= y 0) (= (/ x y) 5.0))", {"x": 5, "y": 0}, 0),  # the division is guarded
        ("(ite (> x 3) (= (mod y 2) 1) (= (div y 2) 1))", {"x": 5, "y": 3}, 0),
        ("(distinct x y 7)", {"x": 7, "y": 3}, 1),
        ('(= day "Monday")', {"day": "Monday"}, 0),
        ('(= day "Monday")', {"day": 1}, 1),
        ("(=> open (> x 1))", {"open": False, "x": 0}, 0),
        ("(=> open (> x 1))", {"open": True, "x": 0}, 1),
    ],
)
def test_a_constraint_on_stated_values(constraint, values, violated):
    names = f"{NAMES}(declare-const day String)(declare-const open Bool)"
    assert check(f"{names}(assert {constraint})", values) == Checked(violated, 1 - violated, 0, 0)


@pytest.mark.parametrize("value", ["Zürich", "東京", 'the "é"', "\U0001f600", "\U000e0001"])
def test_texts_beyond_ascii_are_read_as_written(value):
    literal = '"' + value.replace('"', '""') + '"'
    text = f'; é | "\n(declare-const |größe| Int)(declare-const s String)(assert (= s {literal}))(assert (> |größe| 2))'
    assert check(text, {"s": value, "größe": 3}) == Checked(0, 2, 0, 0)
    assert check(text, {"s": value.encode().decode("latin1"), "größe": 2}) == Checked(2, 0, 0, 0)


ATOMS = st.builds(
    lambda names, operator, shift: f"({operator} {names[0]} (+ {names[1]} {shift}))",
    st.sampled_from(["ab", "bc", "ca"]),
    st.sampled_from(["<", "=", ">", "distinct"]),
    st.integers(-1, 1),
)


@given(st.lists(ATOMS, max_size=5), st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)))
def test_counts_agree_with_enumeration(atoms, values):
    """Reference: every value in 0..3 of the names that are not stated; larger values are excluded by constraints."""
    domain = "".join(f"(declare-const {name} Int)" for name in "abc")
    bounds = [f"(and (<= 0 {name}) (<= {name} 3))" for name in "abc" for _ in range(len(atoms) + 1)]
    checked = check(domain + "".join(f"(assert {atom})" for atom in [*bounds, *atoms]), values)
    violations = [
        [not holds(atom, dict(zip("abc", point, strict=True))) for atom in atoms]
        for point in itertools.product(*([values[name]] if name in values else range(4) for name in "abc"))
    ]
    is_stated = [all(name in values for name in re.findall(r"\b[abc]\b", atom)) for atom in atoms]
    num_bounds_stated = len(values) * (len(atoms) + 1)
    assert checked.violated == min(map(sum, violations))
    assert checked.held == num_bounds_stated + sum(
        stated and not any(row[index] for row in violations) for index, stated in enumerate(is_stated)
    )
    assert sum(checked) == len(atoms) + len(bounds)


def holds(atom: str, point: dict[str, int]) -> bool:
    operator, left, _, right, shift = atom.replace("(", " ").replace(")", " ").split()
    operator = {"=": "==", "distinct": "!="}.get(operator, operator)
    return bool(eval(f"{point[left]} {operator} {point[right]} + {shift}"))


def squares(depth: int) -> str:
    """Formula x^(2^depth) > 1 in linear space."""
    lets = "".join(f"(let ((a{i} (* {f'a{i - 1} a{i - 1}' if i else 'x x'}))) " for i in range(depth))
    return f"{NAMES}(assert {lets}(> a{depth - 1} 1){')' * depth})"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(assert (> w 1))", r"they are not SMT-LIB .*unknown constant w"),
        ("(assert (> x 1)", r"they are not SMT-LIB"),
        (f"{NAMES}(assert x)", r"they are not SMT-LIB"),
        ("nonsense", r"they are not SMT-LIB"),
        (f"; {'x' * MAX_CHARS}", r"they have 20002 characters; use at most 20000"),
        ('(include "/etc/passwd")', r"the command 'include' is not allowed; use assert, declare-const"),
        ('(set-option :diagnostic-output-channel "x")', r"the command 'set-option' is not allowed"),
        ('(assert true) ; "\n(include "x")', r"the command 'include' is not allowed"),
        ('(assert (= |"| 1)) (include "x")', r"the command 'include' is not allowed"),
        (f"(assert {'(not ' * 200}true{')' * 201}", r"nested deeper than 100"),
        ("(define-fun f ((a Int)) Int (+ a a))", r"the function 'f' has parameters"),
        ("(declare-fun f (Int) Int)(assert (= (f 1) 1))", r"they use 'f\(1\)', which is not supported"),
        (f"{NAMES}(assert (forall ((a Int)) (> a x)))", r"they use 'ForAll.*not supported"),
        (f"{NAMES}(assert (= x (^ 2 y)))", r"they use '2\*\*y', which is not supported"),
        ("(declare-const b (_ BitVec 8))(assert (= b #x01))", r"not supported; use Bool, Int, Real and String"),
        (squares(4), r"their size is over 20000 once products are expanded"),
        (squares(60), r"their size is over 20000 once products are expanded"),
    ],
)
def test_a_wrong_or_hostile_text_is_refused(text, message):
    with pytest.raises(ObjectiveError, match=message):
        parse_constraints(text, z3.Context())


def test_a_hard_system_is_undecided():
    cubes = f"{NAMES}(assert (and (> x 1) (> y 1) (= (+ (* x x x) (* y y y)) (* 29 29 29))))"
    assert check(cubes, {}) == Checked(0, 0, 0, 1)
    assert check(cubes, {"x": 2, "y": 3}) == Checked(1, 0, 0, 0)


@pytest.mark.parametrize("values", [5, [("x",)], {"x": [1]}, {1: 2}])
def test_an_extractor_that_returns_no_values_raises(values):
    with pytest.raises(ObjectiveError, match=r"the extractor returned .*; return a Solution, or values by name"):
        group_values(values)


def batch_of(texts: list[str], **labels: list[str]) -> Batch:
    batch, _ = make_batch([1] * len(texts), texts=texts)
    return replace(batch, text_labels_D={name: tuple(values) for name, values in labels.items()})


def scores(batch: Batch, **params: object) -> list[float]:
    bound = bind("logic", params=params)
    outputs = make_batch([1] * batch.num_datums)[1]
    return bound.term(
        outputs,
        replace(batch, features=prepare_features(bound, batch)),
        unchecked=bound.params["unchecked"],
    )[0].tolist()


SUM = "(declare-const x Int)(declare-const y Int)(assert (= (+ x y) 5))(assert (> x y))"


def test_an_answer_is_scored_by_the_constraints_of_its_datum():
    texts = ["x = 3, y = 2", "x = 2, y = 3", "x = 3", "x = 9, y = 0", "nothing", "x=3 and also x=4", "x = 1"]
    batch = batch_of(texts, constraints=[SUM] * 6 + [""])
    params = {"extractor": "assignments", "constraints": "constraints"}
    # The third answer leaves both constraints open. The last datum has no constraints.
    assert scores(batch, **params) == [0.0, 0.5, 0.0, 0.5, 0.0, 1.0, 0.0]
    assert scores(batch, **params, unchecked=0.5) == [0.0, 0.5, 0.5, 0.5, 0.5, 1.0, 0.5]


def test_contradictory_values_are_found_without_constraints():
    texts = ["x=3 and also x=4", "x=3, y=1, x=4", "x=3 and x=3.0", "none"]
    assert scores(batch_of(texts), extractor="assignments", unchecked=1.0) == [1.0, 0.5, 0.0, 1.0]


def at_most(labels: dict[str, str], context: z3.Context) -> list[z3.BoolRef]:
    return [z3.Int(name, context) <= int(labels["limit"]) for name in "xy"]


def of_another_context(labels: dict[str, str], context: z3.Context) -> list[z3.BoolRef]:
    return [z3.Int("x") > 1]


def no_list(labels: dict[str, str], context: z3.Context) -> z3.BoolRef:
    return z3.Int("x", context) > 1


def broken(labels: dict[str, str], context: z3.Context) -> list[z3.BoolRef]:
    return [z3.Int("x", context) <= int(labels["no_such_label"])]


def read_pair(text: str) -> dict[str, int]:
    return dict(zip("xy", map(int, text.split()), strict=True))


def test_constraints_and_values_from_functions_of_the_user():
    batch = batch_of(["1 2", "1 5", "9 9"], limit=["3", "3", "9"])
    functions = {"extractor": f"{__name__}:read_pair", "constraints": f"{__name__}:at_most"}
    assert scores(batch, **functions) == [0.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"constraints": "rules"}, r"the data has no text label 'rules' \(text labels: limit\); add it to each"),
        ({"constraints": f"{__name__}:of_another_context"}, r"of the datum '1 2' are wrong: .*another Z3 context"),
        ({"constraints": f"{__name__}:no_list"}, r"they are 'x > 1'; return a list of Boolean Z3 expressions"),
        ({"constraints": f"{__name__}:broken"}, r"it raised KeyError: 'no_such_label'"),
        ({"constraints": f"{__name__}:missing"}, r"could not be imported .*has no attribute 'missing'"),
        ({"constraints": "limit"}, r"the constraints '3' of the datum '1 2' are wrong: they are not SMT-LIB"),
        ({"extractor": "no module:f"}, r"'no module:f' is not an import path"),
        ({"extractor": f"{__name__}:NAMES"}, r"NAMES' is of type str; name a function"),
        ({"extractor": "gsm8k", "constraints": "limit"}, r"'gsm8k' returns annotations, but constraints need"),
    ],
)
def test_a_wrong_parameter_names_the_problem(params, message):
    with pytest.raises(ObjectiveError, match=message):
        scores(batch_of(["1 2"], limit=["3"]), **{"extractor": f"{__name__}:read_pair"} | params)


def test_runs_of_deployments_import_functions_only_from_allowed_modules(monkeypatch):
    params = {"extractor": f"{__name__}:read_pair"}
    spec = ObjectiveSpec.model_validate({"regularizers": [{"name": "logic", "params": params}]})
    assert Objective.from_spec(spec).regularizers
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "of a deployment")
    monkeypatch.delenv("TINKER_FLOWS_ALLOWED_MODULES", raising=False)
    with pytest.raises(ObjectiveError, match=rf"may not import '{__name__}:read_pair': add the module"):
        Objective.from_spec(spec)
    monkeypatch.setenv("TINKER_FLOWS_ALLOWED_MODULES", __name__)
    assert Objective.from_spec(spec).regularizers


def test_checks_are_thread_safe():
    texts = [f"x = {x}, y = {y}" for x in range(5) for y in range(4)]
    batch = batch_of(texts, constraints=[SUM] * len(texts))
    params = {"extractor": "assignments", "constraints": "constraints"}
    expected = [((x + y != 5) + (x <= y)) / 2 for x in range(5) for y in range(4)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: scores(batch, **params), range(8))) == [expected] * 8


def test_features_depend_on_the_text_labels_and_on_the_code_of_functions(tmp_path: Path, monkeypatch):
    module = tmp_path / "rules_of_a_user.py"
    module.write_text("def read(text):\n    return {'x': 1}\n")
    monkeypatch.syspath_prepend(tmp_path)
    bound = bind("logic", params={"extractor": "rules_of_a_user:read", "constraints": "c"})
    cache, calls = FeatureCache(), []

    def features(limit: int) -> object:
        batch = batch_of(["text"], c=[f"(declare-const x Int)(assert (< x {limit}))"])

        def prepare(subset: Batch) -> object:
            calls.append(subset.text_labels_D["c"])
            return prepare_features(bound, subset)

        return [verdict.violated for verdict in cache.features(bound, batch, prepare)]

    assert [features(5), features(0), features(5)] == [[0], [1], [0]]
    assert len(calls) == 2
    module.write_text("def read(text):\n    return {'x': 1}  # changed\n")
    linecache.checkcache()
    assert (features(5), len(calls)) == ([0], 3)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("x=3", [("x", 3)]),
        ("x = -3.50.", [("x", Fraction(-7, 2))]),
        ("2x = 3, 10/y = 5, a + y = 2", []),
        ("x = 3 + y, x = 3*2, x = 3 = y", []),
        ("start_a = 9; start_b = 10", [("start_a", 9), ("start_b", 10)]),
        (f"x = {'9' * 40}", []),
        ("x = 1,000, y = 12,345.5 and z = -2", [("x", 1000), ("y", Fraction(24691, 2)), ("z", -2)]),
        ("x = 12,5, y = 1,0000, z = 1.2.3", []),
        ("- x = 3\n- y = 2\n\n* z = 1\n2. w = 4", [("x", 3), ("y", 2), ("z", 1), ("w", 4)]),
        ("x = 3\n- so **y = 2** (from the first line)", [("x", 3), ("y", 2)]),
        ("x = 3 (given), x = \N{MINUS SIGN}3", [("x", 3), ("x", -3)]),
        ("x =\n5, y\n= 6", [("x", 5), ("y", 6)]),
        ("3 * 4\n+ x = 10", []),
        ("x = 3**2, x = 3 ** 2, x = 3(y), 5 - x = 2", []),
    ],
)
def test_assignments_are_read_but_equations_are_not(text, values):
    assert read_assignments(text) == values


def test_text_labels_travel_from_the_datum_to_the_batch():
    inputs = {"target_tokens": torch.tensor([1, 2]), "weights": torch.ones(2)}
    plain = tinker.Datum(model_input=tinker.ModelInput.from_ints([1, 2]), loss_fn_inputs=dict(inputs))
    labelled = with_labels(plain, {"constraints": "(assert (= é 1))", "group": 3})

    class Tokenizer:
        def decode(self, tokens: list[int]) -> str:
            return str(tokens)

    batch = pack_data([labelled, plain], Tokenizer())
    assert batch.text_labels_D == {"constraints": ("(assert (= é 1))", "")}
    assert batch.labels_D["group"].tolist() == [3, -1]
    assert without_labels(labelled) == plain
    wrong = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={**inputs, "text:constraints": torch.tensor([1.5])},
    )
    with pytest.raises(ObjectiveError, match=r"Datum 1 has no UTF-8 text under 'text:constraints'"):
        pack_data([plain, wrong], Tokenizer())
