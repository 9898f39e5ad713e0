"""How much likelier right solutions become than wrong ones, with the terms that score them and without.

python -m examples.margins [--plot margins.png] [field=value ...]

Each batch has both solutions of some short GSM8K problems: the right one, and one that `examples.gsm8k.corrupt` made
wrong. Cross-entropy trains both alike. The terms see the texts only, and are not told which is which, nor what belongs
together. Every few steps the margin is measured on problems that are held out: the log-probability of the right
solution less that of the wrong one, in nats.
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
from flows.command_line import exit_with_a_sentence, run
from flows.config_file import load_config
from flows.result import TrainResult
from flows.sft import SftConfig, sft

CONFIG = Path(__file__).with_name("margins.yaml")
MARGIN, PREFERRED, NLL = "test/margin", "test/right_preferred", "test/right_nll"
_MAX_CHARACTERS = 300  # of question and answer: some 100 tokens
_NUM_HELD_OUT = 10


def short_problems() -> list[dict[str, str]]:
    """Short problems with a right and a wrong solution: ``question``, ``answer``, ``wrong``; the last are held out."""
    problems = []
    for index, row in enumerate(read_problems(DATA / "gsm8k_train.jsonl")):
        wrong = corrupt(row["answer"], random.Random(f"margins:{index}"))
        if wrong != row["answer"] and len(row["question"]) + len(row["answer"]) <= _MAX_CHARACTERS:
            problems.append(row | {"wrong": wrong})
    return problems


def both_solutions(row: dict[str, str], renderer: Renderer, max_length: int | None = None) -> list[tinker.Datum]:
    """The right solution of a problem and its wrong one; the solution alone is trained on."""
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
    """Problems with two solutions each, side by side in a batch; none is held out here, see `HeldOutMargin`."""

    def __call__(self) -> tuple[SupervisedDataset, None]:
        config = self.common_config
        rows = datasets.Dataset.from_list(short_problems()[:-_NUM_HELD_OUT])
        return SupervisedDatasetFromHFDataset(
            rows, config.batch_size, flatmap_fn=lambda row: both_solutions(row, self.renderer, config.max_length)
        ), None


class HeldOutMargin(TrainingClientEvaluator):
    """The margin on problems that are not trained on.

    Metrics:
        test/margin: nats, mean over problems: the log-probability of the right solution less that of the wrong one;
        test/right_preferred: the share of problems where it is above 0; test/right_nll: nats per token of right ones.
    """

    async def __call__(self, training_client: tinker.TrainingClient) -> dict[str, float]:
        renderer = get_renderer("qwen3_instruct", training_client.get_tokenizer())
        data = [datum for row in short_problems()[-_NUM_HELD_OUT:] for datum in both_solutions(row, renderer)]
        output = await training_client.forward(data, "cross_entropy")
        masks = [datum.loss_fn_inputs["weights"].to_torch() > 0 for datum in data]
        outputs = output.loss_fn_outputs
        logprobs = [each["logprobs"].to_torch()[mask] for each, mask in zip(outputs, masks, strict=True)]
        sums = [float(each.sum()) for each in logprobs]
        margins = [right - wrong for right, wrong in zip(sums[::2], sums[1::2], strict=True)]
        return {
            MARGIN: sum(margins) / len(margins),
            PREFERRED: sum(margin > 0 for margin in margins) / len(margins),
            NLL: -sum(sums[::2]) / sum(len(each) for each in logprobs[::2]),
        }


def train_both(overrides: Sequence[str]) -> dict[str, TrainResult]:
    """The two runs, each going on where it was stopped: with the terms of the config, and without any."""
    results = {}
    for name, more in (("with the terms", []), ("without", ["objective.regularizers=[]"])):
        config = load_config(SftConfig, CONFIG, [*overrides, *more])
        variant = config.model_copy(update={"run_name": f"{config.run_name}-{name.replace(' ', '-')}"})
        results[name] = run(sft, variant)
    return results


def history(result: TrainResult, metric: str) -> dict[int, float]:
    """A metric of a run by step, from MLflow."""
    points = MlflowClient(result.tracking_uri).get_metric_history(result.mlflow_run_id, metric)
    return {point.step: point.value for point in points}


def draw(results: dict[str, TrainResult], path: Path) -> None:
    """Margin and likelihood of both runs over the steps, as PNG."""
    figure = Figure(figsize=(8, 3), dpi=110, layout="constrained")
    panels = figure.subplots(1, 2)
    labels = ("margin of right over wrong (nats)", "NLL of right solutions (nats/token)")
    for panel, metric, label in zip(panels, (MARGIN, NLL), labels, strict=True):
        for name, result in results.items():
            points = history(result, metric)
            panel.plot(list(points), list(points.values()), marker="o", markersize=3, label=name)
        panel.set(xlabel="step", ylabel=label)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False)
    figure.savefig(path)


def show(results: dict[str, TrainResult]) -> None:
    """A line per step: the margin of each run, and the share of right solutions that are preferred."""
    margins = {name: history(result, MARGIN) for name, result in results.items()}
    shares = {name: history(result, PREFERRED) for name, result in results.items()}
    print("step  " + "  ".join(f"{name:>24}" for name in results))
    for step in next(iter(margins.values())):
        cells = [f"{margins[name][step]:8.3f} nats {shares[name][step]:8.0%}  " for name in results]
        print(f"{step:4}  " + "  ".join(f"{cell:>24}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.margins", description=__doc__)
    parser.add_argument("--plot", type=Path, default=Path("margins.png"), help="where to draw; margins.png by default")
    parser.add_argument("overrides", nargs="*", metavar="field=value", help="fields that override those of the YAML")
    arguments = parser.parse_args()
    results = train_both(arguments.overrides)
    show(results)
    draw(results, arguments.plot)
    print(f"drawn in {arguments.plot}")


if __name__ == "__main__":
    exit_with_a_sentence(main)
