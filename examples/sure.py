"""SmolLM2 learns to be sure of its sums: DPO on the pairs of `examples.preferences`, and its curve.

python -m examples.sure [--plot sure.png] [field=value ...]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from examples.margins import history
from flows.command_line import exit_with_a_sentence, run, show_result
from flows.config_file import load_config
from flows.dpo import DpoConfig, dpo
from flows.result import TrainResult

CONFIG = Path(__file__).with_name("sure.yaml")
CURVES = {
    "share of pairs": ("accuracy", "test/accuracy"),
    "reward": ("chosen_reward", "rejected_reward", "test/chosen_reward", "test/rejected_reward"),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.sure", description=__doc__)
    parser.add_argument("--plot", type=Path, default=Path("sure.png"), help="where to draw; sure.png by default")
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="fields that override those of the YAML")
    arguments = parser.parse_args()
    result = run(dpo, load_config(DpoConfig, CONFIG, arguments.overrides))
    show_result(result)
    draw(result, arguments.plot)
    print(f"drawn in {arguments.plot}")


def draw(result: TrainResult, path: Path) -> None:
    """Accuracy and rewards over the steps, of the batches and of held-out pairs, as PNG."""
    figure = Figure(figsize=(8, 3), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2)
    for panel, (label, metrics) in zip(panels, CURVES.items(), strict=True):
        for metric in metrics:
            points = sorted(history(result, metric).items())
            style = "o" if metric.startswith("test/") else "-"
            panel.plot(*zip(*points, strict=True), style, markersize=5, label=metric)
        panel.set(xlabel="step", ylabel=label)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    exit_with_a_sentence(main)
