"""Log-probability margin of correct over corrupted solutions, trained with and without the terms that score them.

python -m examples.margins [--plot margins.png] [field=value ...]

Each batch has two solutions of some short GSM8K problems: the correct one, and one that `examples.gsm8k.corrupt`
corrupted. Cross-entropy trains on both equally. The terms see only the texts, without labels. Every few steps, the
margin is measured on held-out problems: the log-probability of the correct solution minus the log-probability of the
corrupted one, in nats.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import chz
import datasets
import tinker
from matplotlib.figure import Figure
from mlflow import MlflowClient
from tinker_cookbook.eval.evaluators import TrainingClientEvaluator
from tinker_cookbook.renderers import Renderer, TrainOnWhat, get_renderer
from tinker_cookbook.supervised.data import SupervisedDatasetFromHFDataset, conversation_to_datum
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset

from examples.gsm8k import DATA, corrupt, read_problems
from tinker_flows import SftConfig, TrainResult, exit_on_error, load_config, run, sft

CONFIG = Path(__file__).with_name("margins.yaml")
MARGIN, PREFERRED, NLL = "test/margin", "test/right_preferred", "test/right_nll"
_MAX_CHARACTERS = 300  # question and answer, about 100 tokens
_NUM_HELD_OUT = 10


def short_problems() -> list[dict[str, str]]:
    """Return short problems with ``question``, ``answer`` and a corrupted copy ``wrong``; the last ten are held out."""
    problems = []
    for index, row in enumerate(read_problems(DATA / "gsm8k_train.jsonl")):
        wrong = corrupt(row["answer"], random.Random(f"margins:{index}"))
        if wrong != row["answer"] and len(row["question"]) + len(row["answer"]) <= _MAX_CHARACTERS:
            problems.append(row | {"wrong": wrong})
    return problems


def both_solutions(row: dict[str, str], renderer: Renderer, max_length: int | None = None) -> list[tinker.Datum]:
    """Return the correct and the corrupted solution of a problem as datums; only solution tokens have loss."""
    return [
        conversation_to_datum(
            [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row[solution]}],
            renderer,
            max_length,
            TrainOnWhat.LAST_ASSISTANT_MESSAGE,
        )
        for solution in ("answer", "wrong")
    ]


@chz.chz
class BothSolutionsBuilder(ChatDatasetBuilder):
    """Dataset of problems with both solutions in the same batch; `HeldOutMargin` evaluates the held-out problems."""

    def __call__(self) -> tuple[SupervisedDataset, None]:
        config = self.common_config
        rows = datasets.Dataset.from_list(short_problems()[:-_NUM_HELD_OUT])
        return SupervisedDatasetFromHFDataset(
            rows, config.batch_size, flatmap_fn=lambda row: both_solutions(row, self.renderer, config.max_length)
        ), None


class HeldOutMargin(TrainingClientEvaluator):
    """Margin on held-out problems.

    Metrics:
        test/margin: log-probability of the correct minus the corrupted solution in nats, mean over problems.
        test/right_preferred: share of problems with a positive margin.
        test/right_nll: nats per token of the correct solutions.
    """

    async def __call__(self, training_client: tinker.TrainingClient) -> dict[str, float]:
        renderer = get_renderer("qwen3_instruct", training_client.get_tokenizer())
        data = [datum for row in short_problems()[-_NUM_HELD_OUT:] for datum in both_solutions(row, renderer)]
        output = await training_client.forward(data, "cross_entropy")
        masks = [datum.loss_fn_inputs["weights"].to_torch() > 0 for datum in data]
        outputs = output.loss_fn_outputs
        logprobs = [
            datum_output["logprobs"].to_torch()[mask] for datum_output, mask in zip(outputs, masks, strict=True)
        ]
        sums = [float(logprobs_T.sum()) for logprobs_T in logprobs]
        margins = [right - wrong for right, wrong in zip(sums[::2], sums[1::2], strict=True)]
        return {
            MARGIN: sum(margins) / len(margins),
            PREFERRED: sum(margin > 0 for margin in margins) / len(margins),
            NLL: -sum(sums[::2]) / sum(len(logprobs_T) for logprobs_T in logprobs[::2]),
        }


def train_both(overrides: Sequence[str]) -> dict[str, TrainResult]:
    """Run or resume both variants: with the terms of the config, and without terms."""
    results = {}
    for name, changes in (("with the terms", []), ("without", ["objective.regularizers=[]"])):
        config = load_config(SftConfig, CONFIG, [*overrides, *changes])
        variant = config.model_copy(update={"run_name": f"{config.run_name}-{name.replace(' ', '-')}"})
        results[name] = run(sft, variant)
    return results


def history(result: TrainResult, metric: str) -> dict[int, float]:
    """Read a metric of a run from MLflow, by step."""
    points = MlflowClient(result.tracking_uri).get_metric_history(result.mlflow_run_id, metric)
    return {point.step: point.value for point in points}


def draw(results: dict[str, TrainResult], path: Path) -> None:
    """Draw margin and likelihood of both runs as PNG."""
    figure = Figure(figsize=(8, 3), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2)
    labels = ("margin (nats)", "NLL of correct solutions (nats/token)")
    for panel, metric, label in zip(panels, (MARGIN, NLL), labels, strict=True):
        for name, result in results.items():
            points = history(result, metric)
            panel.plot(list(points), list(points.values()), marker="o", markersize=3, label=name)
        panel.set(xlabel="step", ylabel=label)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.savefig(path)


def show(results: dict[str, TrainResult]) -> None:
    """Print one line per step: the margin of each run and the share of problems with a positive margin."""
    margins = {name: history(result, MARGIN) for name, result in results.items()}
    shares = {name: history(result, PREFERRED) for name, result in results.items()}
    print("step  " + "  ".join(f"{name:>24}" for name in results))
    for step in next(iter(margins.values())):
        cells = [f"{margins[name][step]:8.3f} nats {shares[name][step]:8.0%}  " for name in results]
        print(f"{step:4}  " + "  ".join(f"{cell:>24}" for cell in cells))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.margins", description=__doc__)
    parser.add_argument("--plot", type=Path, default=Path("margins.png"), help="output file; default: margins.png")
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="config fields that override the YAML file")
    arguments = parser.parse_args()
    results = train_both(arguments.overrides)
    show(results)
    draw(results, arguments.plot)
    print(f"The plot is in {arguments.plot}")


if __name__ == "__main__":
    exit_on_error(main)
