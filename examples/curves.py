"""Learning curves of SmolLM2 with some of the recipes.

python -m examples.curves sure [--plot sure.png] [field=value ...]

The same command resumes a stopped run.
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
from tinker_flows import TrainResult, exit_on_error, load_config, run


@dataclass(frozen=True)
class Drawing:
    """Plot of a recipe.

    Attributes:
        panels: metrics of each panel by axis label.
        variants: config overrides by name of the variant; each variant is one run.
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
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.curves", description=__doc__)
    parser.add_argument("recipe", choices=DRAWINGS, help="recipe of docs/recipes.md")
    parser.add_argument("--plot", type=Path, help="output file; default: RECIPE.png")
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="config fields that override the YAML file")
    arguments = parser.parse_args()
    drawing, path = DRAWINGS[arguments.recipe], arguments.plot or Path(f"{arguments.recipe}.png")
    results = train(arguments.recipe, drawing, arguments.overrides)
    print("\n".join(lines(drawing, results)))
    draw(drawing, results, path)
    print(f"The plot is in {path}")


def train(recipe: str, drawing: Drawing, overrides: Sequence[str]) -> dict[str, TrainResult]:
    """Train every variant; return the results by variant."""
    method = RECIPES[recipe]
    results = {}
    for variant, changes in drawing.variants.items():
        config = load_config(config_type_of(method), file_of(recipe), [*overrides, *changes])
        name = "-".join([config.run_name, *variant.split()])
        results[variant] = run(flow_of(method), config.model_copy(update={"run_name": name}))
    return results


def curves(metrics: Sequence[str], results: Mapping[str, TrainResult]) -> dict[str, list[tuple[int, float]]]:
    """Return the points of every metric and variant by curve label; leave out metrics without values."""
    all_curves = {
        f"{metric} {variant}".strip(): sorted(history(result, metric).items())
        for variant, result in results.items()
        for metric in metrics
    }
    return {label: points for label, points in all_curves.items() if points}


def lines(drawing: Drawing, results: Mapping[str, TrainResult]) -> list[str]:
    """Return one line per curve with its first and last point."""
    return [
        f"{label}: " + ", ".join(f"{value:.4g} at step {step}" for step, value in (points[0], points[-1]))
        for metrics in drawing.panels.values()
        for label, points in curves(metrics, results).items()
    ]


def draw(drawing: Drawing, results: Mapping[str, TrainResult], path: Path) -> None:
    """Draw the panels into an image file; curves of held-out metrics have dots."""
    figure = Figure(figsize=(8, 3), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(drawing.panels), squeeze=False)[0]
    for panel, (axis_label, metrics) in zip(panels, drawing.panels.items(), strict=True):
        for label, points in curves(metrics, results).items():
            style = "o--" if label.startswith("test/") else "-"
            panel.plot(*zip(*points, strict=True), style, markersize=4, label=label)
        panel.set(xlabel="step", ylabel=axis_label)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, fontsize="small")
    figure.savefig(path)


if __name__ == "__main__":
    exit_on_error(main)
