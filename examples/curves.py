"""What SmolLM2 learns by some of the recipes, as curves.

python -m examples.curves sure [--plot sure.png] [field=value ...]

A run that was stopped goes on with the same command.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure

from deployments.methods import config_type_of, flow_of
from deployments.recipes import RECIPES, file_of
from examples.margins import history
from flows.command_line import exit_with_a_sentence, run
from flows.config_file import load_config
from flows.result import TrainResult


@dataclass(frozen=True)
class Drawing:
    """What is drawn of a recipe.

    Attributes:
        panels: metrics, by what they measure.
        variants: overrides of the config by what they change; one run each.
    """

    panels: Mapping[str, Sequence[str]]
    variants: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"": ()})


DRAWINGS = {
    "sure": Drawing(
        {
            "share of pairs": ("accuracy", "test/accuracy"),
            "reward": ("chosen_reward", "rejected_reward", "test/chosen_reward", "test/rejected_reward"),
        }
    ),
    "prompt_distillation": Drawing(
        {
            "NLL (nats/token)": ("test/nll", "test/nll_teacher"),
            "KL divergence (nats/token)": ("teacher_kl/forward", "test/teacher_kl"),
        }
    ),
    "multiply": Drawing(
        {
            "score": ("env/all/score", "test/env/all/score"),
            "KL divergence (nats/token)": ("term/kl/value",),
        },
        {"with kl": (), "without": ("objective.regularizers.kl.weight=0",)},
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.curves", description=__doc__)
    parser.add_argument("recipe", choices=DRAWINGS, help="as in docs/recipes.md")
    parser.add_argument("--plot", type=Path, help="where to draw; RECIPE.png by default")
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="fields that override those of the YAML")
    arguments = parser.parse_args()
    drawing, path = DRAWINGS[arguments.recipe], arguments.plot or Path(f"{arguments.recipe}.png")
    results = train(arguments.recipe, drawing, arguments.overrides)
    print("\n".join(lines(drawing, results)))
    draw(drawing, results, path)
    print(f"drawn in {path}")


def train(recipe: str, drawing: Drawing, overrides: Sequence[str]) -> dict[str, TrainResult]:
    """A run of each variant."""
    method = RECIPES[recipe]
    results = {}
    for variant, changes in drawing.variants.items():
        config = load_config(config_type_of(method), file_of(recipe), [*overrides, *changes])
        name = "-".join([config.run_name, *variant.split()])
        results[variant] = run(flow_of(method), config.model_copy(update={"run_name": name}))
    return results


def curves(metrics: Sequence[str], results: Mapping[str, TrainResult]) -> dict[str, list[tuple[int, float]]]:
    """The points of each metric of each variant, by its label; without those that never had a value."""
    found = {
        f"{metric} {variant}".strip(): sorted(history(result, metric).items())
        for variant, result in results.items()
        for metric in metrics
    }
    return {label: points for label, points in found.items() if points}


def lines(drawing: Drawing, results: Mapping[str, TrainResult]) -> list[str]:
    """A line for each curve: its first point and its last."""
    return [
        f"{label}: " + ", ".join(f"{value:.4g} at step {step}" for step, value in (points[0], points[-1]))
        for metrics in drawing.panels.values()
        for label, points in curves(metrics, results).items()
    ]


def draw(drawing: Drawing, results: Mapping[str, TrainResult], path: Path) -> None:
    """The panels side by side over the steps, as PNG; what is held out has dots."""
    figure = Figure(figsize=(8, 3), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(drawing.panels), squeeze=False)[0]
    for panel, (measured, metrics) in zip(panels, drawing.panels.items(), strict=True):
        for label, points in curves(metrics, results).items():
            style = "o--" if label.startswith("test/") else "-"
            panel.plot(*zip(*points, strict=True), style, markersize=4, label=label)
        panel.set(xlabel="step", ylabel=measured)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    exit_with_a_sentence(main)
