"""Terms by name, by entry point and by import path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from objectives import Objective, ObjectiveError, ObjectiveSpec
from objectives.config.describe import first_line, parameters_of
from objectives.config.import_policy import ALLOWED_MODULES
from objectives.config.term_lookup import find_term, offered_terms, registered_terms
from objectives.term import TERMS

MODULE = '''\
from typing import Annotated
from pydantic import Field
from objectives.term import regularizer

def look_up(batch, *, table: str):
    """Look it up.

    Args:
        table: where to look,
            and where not.

    Raises:
        OSError: nothing is there.
    """

@regularizer("offered_{0}", "scored", prepare=look_up)
def offered(outputs, batch, *, limit: Annotated[int, Field(ge=1, lt=9, description="how many")] = 3):
    """Scores from elsewhere.

    And more.
    """

plain = len
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Install a distribution with an entry point of a term; return the module's name."""
    name = f"acme_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(MODULE.replace("{0}", name))
    (tmp_path / f"{name}_broken.py").write_text("raise OSError('no licence\\nhere.')")
    info = tmp_path / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    points = {"offered": f"{name}:offered", "broken": f"{name}_broken:x", "plain": f"{name}:plain"}
    listed = "\n".join(f"{name}_{key} = {value}" for key, value in points.items())
    (info / "entry_points.txt").write_text(f"[tinker_flows.regularizers]\n{listed}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)
    TERMS.pop(f"offered_{name}", None)


def test_entry_points_are_imported_on_first_use(package: str) -> None:
    assert {f"{package}_offered", f"{package}_broken", f"{package}_plain"} <= offered_terms().keys()
    with pytest.raises(ObjectiveError, match=f"registered as 'topolgy'; did you mean .*{package}_offered"):
        find_term("topolgy")
    assert package not in sys.modules
    objective = Objective(regularizers=[{"name": f"{package}_offered", "params": {"table": "t"}}])
    assert objective.regularizers[0].term is registered_terms()[f"offered_{package}"]


def test_a_broken_entry_point_raises(package: str) -> None:
    with pytest.raises(ObjectiveError, match=rf"{package}_broken:x of {package} \(OSError: no licence here\); correct"):
        find_term(f"{package}_broken")
    with pytest.raises(ObjectiveError, match=rf"{package}:plain of {package} is of type builtin_function_or_method"):
        find_term(f"{package}_plain")


def test_deployments_import_terms_only_from_allowed_modules(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import paths, and the entry points of installed packages."""
    monkeypatch.setenv("PREFECT__FLOW_RUN_ID", "of a deployment")
    monkeypatch.delenv(ALLOWED_MODULES, raising=False)
    by_path = {"name": "mine", "fn": f"{package}:offered", "params": {"table": "t"}}
    for entry in (by_path, {"name": f"{package}_offered", "params": {"table": "t"}}):
        spec = ObjectiveSpec.model_validate({"regularizers": [entry]})
        with pytest.raises(ObjectiveError, match=f"add the module '{package}' to {ALLOWED_MODULES}"):
            Objective.from_spec(spec)
        monkeypatch.setenv(ALLOWED_MODULES, f"acme, {package}x")
        with pytest.raises(ObjectiveError, match=f"add the module '{package}' to {ALLOWED_MODULES}"):
            Objective.from_spec(spec)
        assert package not in sys.modules
    monkeypatch.setenv(ALLOWED_MODULES, f"acme,{package}")
    assert Objective.from_spec(spec).regularizers[0].term.name == f"offered_{package}"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.at_all:x", r"ModuleNotFoundError: No module named 'nowhere'\); correct the path"),
        ("objectives.term:nothing", "ImportError"),
        ("objectives.term:regularizer", "is of type function, not a term"),
        (":x", "could not be imported"),
        ("leaving:x", r"ImportError: module 'leaving' calls sys\.exit\(2\) while it is imported\); correct the path"),
    ],
)
def test_a_wrong_import_path_raises_one_sentence(
    path: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving.py").write_text("raise SystemExit(2)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ObjectiveError, match=message) as error:
        find_term(path)
    assert "\n" not in str(error.value)


def test_a_term_describes_itself(package: str) -> None:
    term = find_term(f"{package}:offered")
    assert first_line(term) == "Scores from elsewhere."
    assert [
        (parameter.name, parameter.type, parameter.default, parameter.description) for parameter in parameters_of(term)
    ] == [
        ("limit", "int >= 1 and < 9", "3", "how many"),
        ("table", "str", "", "where to look, and where not."),
        (
            "alpha",
            "float > 0",
            "1.0",
            "sharpness of p, per nat. The logprobs of long completions differ by many nats; a low alpha then keeps p "
            "from concentrating on one completion. Shen et al. use 0.005.",
        ),
    ]
