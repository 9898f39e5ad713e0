"""SmolLM2-135M learns to multiply digits, with a penalty on its distance from the base model and without.

python -m examples.multiply [--plot multiply.png] [field=value ...]

The questions are reasoning-gym's `products`; only the number alone is right.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from examples.margins import history
from flows.command_line import exit_with_a_sentence, run
from flows.config_file import load_config
from flows.result import TrainResult
from flows.rl import RlConfig, rl

CONFIG = Path(__file__).with_name("multiply.yaml")
HELD_OUT, TRAINED, DISTANCE = "test/env/all/score", "env/all/score", "term/kl/value"


def train_both(overrides: Sequence[str]) -> dict[str, TrainResult]:
    """The two runs, each going on where it was stopped: `kl` at the weight of the config, and at 0, as a measure."""
    results = {}
    for name, more in (("with kl", []), ("without", ["objective.regularizers.kl.weight=0"])):
        config = load_config(RlConfig, CONFIG, [*overrides, *more])
        variant = config.model_copy(update={"run_name": f"{config.run_name}-{name.replace(' ', '-')}"})
        results[name] = run(rl, variant)
    return results


def draw(results: dict[str, TrainResult], path: Path) -> None:
    """Right answers of both runs over the steps, and how far each is from the base model, as PNG."""
    figure = Figure(figsize=(8, 3), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2)
    for color, (name, result) in zip(("C0", "C1"), results.items(), strict=True):
        for metric, style in ((TRAINED, {"alpha": 0.4}), (HELD_OUT, {"marker": "o", "markersize": 4, "label": name})):
            points = history(result, metric)
            panels[0].plot(list(points), list(points.values()), color=color, **style)
        points = history(result, DISTANCE)
        panels[1].plot(list(points), list(points.values()), color=color, label=name)
    panels[0].set(xlabel="step", ylabel="score, sampled and (dots) held out", ylim=(0, 1))
    panels[1].set(xlabel="step", ylabel="KL from the base model (nats/token)")
    for panel in panels:
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.savefig(path)


def show(results: dict[str, TrainResult]) -> None:
    """A line per evaluation: the score on held-out problems of each run."""
    scores = {name: history(result, HELD_OUT) for name, result in results.items()}
    print("step  " + "  ".join(f"{name:>10}" for name in results))
    for step in next(iter(scores.values())):
        print(f"{step:4}  " + "  ".join(f"{scores[name][step]:10.2f}" for name in results))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.multiply", description=__doc__)
    parser.add_argument(
        "--plot", type=Path, default=Path("multiply.png"), help="where to draw; multiply.png by default"
    )
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="fields that override those of the YAML")
    arguments = parser.parse_args()
    results = train_both(arguments.overrides)
    show(results)
    draw(results, arguments.plot)
    print(f"drawn in {arguments.plot}")


if __name__ == "__main__":
    exit_with_a_sentence(main)
