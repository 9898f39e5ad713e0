"""The effect of an update on a term, against gradient and change of the parameters inside a model."""

from __future__ import annotations

from benchmarks.effects import compare


def test_the_effect_has_the_sign_of_the_change_of_the_parameters() -> None:
    effects = [effect for comparison in compare(40) for effect in comparison.effects.values()]
    assert len(effects) == 40 * 4
    assert sum((measured > 0) == (exact > 0) for measured, exact in effects) / len(effects) >= 0.95
