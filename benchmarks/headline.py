"""Effect of a solver in the objective: GSM8K with corrupted annotations, SmolLM2-135M, five arms.

Each training batch has two solutions of each problem: the right one, and a copy with a wrong operator in one calculator
annotation (`<<48-2=24>>`). Cross-entropy learns both alike. The other arms add `logic`, which sees texts and no labels:

- `data`: the share of false annotations of a solution, averaged over the two solutions of a problem with weights from
  their logprobs per token (`minimum_risk_mean`);
- `candidates`: the share of false annotations of completions that the model samples during training;
- `target`: as `data`, held to a value instead of weighted;
- `shuffled`: as `data`, with the scores shuffled within the batch, so that they say nothing about the texts.

Measured on held-out problems with the final weights: the share of problems whose right solution is more likely than
its copy, the margin between the two, and the share of true annotations in sampled completions.

Settings are chosen on exploration seeds and exploration problems, then run once with other seeds on other problems.
Every finished run is a line of `benchmarks/results/headline.jsonl`, also those of settings that were not chosen. A
repeated command continues where the last one stopped. To start from nothing, delete that file and the folder `headline`
in the project home.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import chz
import datasets
import numpy as np
import tinker
import torch
from matplotlib.figure import Figure
from mlflow import MlflowClient
from rich.table import Table
from scipy import stats
from tinker_cookbook.renderers import Message, Renderer, TrainOnWhat, get_renderer
from tinker_cookbook.supervised.data import SupervisedDatasetFromHFDataset, conversation_to_datum
from tinker_cookbook.supervised.types import ChatDatasetBuilder, SupervisedDataset

from benchmarks.scratch import KEY, bench_engine, environment
from blocks.files.local import home
from examples.gsm8k import read_problems
from objectives.batch import Batch, Outputs
from objectives.term import regularizer
from objectives.terms.text.logic import check_annotations, logic
from tasks.common.sampling import Sampling, sample_answers
from tinker_flows import SftConfig, run, sft

DATA = Path(__file__).parent / "data"
RESULTS = Path(__file__).parent / "results" / "headline.jsonl"
RENDERER = "qwen3_instruct"  # ChatML, the format of SmolLM2
NUM_STEPS = 30
NUM_EXPLORATION_PROBLEMS = 24
EXPLORATION_SEEDS = (100,)
SEEDS = (1, 2, 3)
SAMPLING = Sampling(max_tokens=96, temperature=1.0, num_samples=2, seed=0)
MAX_NLL_RISE = 0.1  # nats per token above cross-entropy; a setting that costs more is not chosen
COMPARED = "held_out_preference"  # name of the term that only measures

# Calculation with integers whose result the text repeats right after it, such as `<<2+3=5>>5`.
_CALCULATION = re.compile(r"<<(\d+)([-+*/])(\d+)=(\d+)>>(?=\4(?![\d.]))")
_ANNOTATION = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")
_ARITHMETIC = re.compile(r"(?!.*(\*\*|//))[\d.+\-*/() ]{1,80}")  # no powers, whose results may be huge


@regularizer("shuffled_logic", kind="scored", prepare=check_annotations)
def shuffled_logic(outputs: Outputs, batch: Batch) -> torch.Tensor:
    """Return the scores of `logic` in another order; the texts of the batch determine the order."""
    scores_D = cast(tuple[torch.Tensor, object], logic.evaluate(outputs, batch))[0]
    seed = int.from_bytes(hashlib.sha256("\0".join(batch.texts_D).encode()).digest()[:4], "big")
    return scores_D[torch.randperm(len(scores_D), generator=torch.Generator().manual_seed(seed))]


def wrong_copy(answer: str, generator: random.Random) -> str:
    """Replace the operator of one annotation, so that the annotation is false.

    >>> wrong_copy("He has 2+3 = <<2+3=5>>5 apples.", random.Random(0))
    'He has 2+3 = <<2*3=5>>5 apples.'
    """
    calculation = generator.choice(list(_CALCULATION.finditer(answer)))
    left, _, right, result = calculation.groups()
    wrong = [operator for operator in "+-*/" if not _holds(f"{left}{operator}{right}", result)]
    annotation = f"<<{left}{generator.choice(wrong)}{right}={result}>>"
    return answer[: calculation.start()] + annotation + answer[calculation.end() :]


def _holds(left: str, right: str) -> bool | None:
    """Return whether an annotation is true, rounded to the decimals it shows; None if it is not plain arithmetic."""
    if not all(_ARITHMETIC.fullmatch(side) for side in (left, right)):
        return None
    try:
        # Independent of the term's parser. The pattern allows only digits and operators.
        exact = (eval(re.sub(r"(\d+\.?\d*|\.\d+)", r"Fraction('\1')", side)) for side in (left, right))
        difference = abs(Fraction(next(exact)) - Fraction(next(exact)))
    except (SyntaxError, TypeError, ValueError, ArithmeticError):
        return None
    decimals = len(right.strip().partition(".")[2])
    return difference <= (Fraction(1, 2 * 10**decimals) if decimals else 0)


@dataclass(frozen=True)
class Problem:
    """Problem with its right solution and a copy that has one false annotation."""

    question: str
    right: str
    wrong: str


def read(split: str) -> list[Problem]:
    """Read the problems of a split: `train`, `explore` (held-out problems of the exploration) or `confirm`."""
    name = "test" if split == "confirm" else "train"
    problems = []
    for index, row in enumerate(read_problems(DATA / f"gsm8k_short_{name}.jsonl")):
        generator = random.Random(f"headline:{name}:{index}")
        problems.append(Problem(row["question"], row["answer"], wrong_copy(row["answer"], generator)))
    parts = {"train": problems[NUM_EXPLORATION_PROBLEMS:], "explore": problems[:NUM_EXPLORATION_PROBLEMS]}
    return parts.get(split, problems)


def both_solutions(problem: Problem, renderer: Renderer) -> list[tinker.Datum]:
    """Return the right solution and its copy as datums; only solution tokens have loss."""
    return [
        conversation_to_datum(
            [Message(role="user", content=problem.question), Message(role="assistant", content=solution)],
            renderer,
            None,
            TrainOnWhat.LAST_ASSISTANT_MESSAGE,
        )
        for solution in (problem.right, problem.wrong)
    ]


@chz.chz
class PairsBuilder(ChatDatasetBuilder):
    """Training problems and held-out problems, each with both solutions.

    Attributes:
        held_out: split of the held-out problems.
    """

    held_out: str

    def __call__(self) -> tuple[SupervisedDataset, SupervisedDataset]:
        renderer = self.renderer
        train, test = (
            SupervisedDatasetFromHFDataset(
                datasets.Dataset.from_list([asdict(problem) for problem in read(split)]),
                batch_size=self.common_config.batch_size,
                flatmap_fn=lambda row: both_solutions(Problem(**row), renderer),
            )
            for split in ("train", self.held_out)
        )
        return train, test


# Settings of each arm, of which the exploration chooses one; `{}` for an arm without settings.
ARMS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "cross-entropy": ({},),
    "data": ({"weight": 5.0}, {"weight": 20.0}),
    "candidates": (
        {"weight": 2.0},
        {"weight": 10.0},
        {"weight": 10.0, "params": {"unchecked": 1.0}},  # an answer without annotations costs as much as a false one
    ),
    "target": ({"target": {"at_most": 0.05}}, {"target": {"at_most": 0.15}}),
    "shuffled": (),  # with the setting of `data`
}


def terms(arm: str, setting: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the regularizers of an arm; all arms have one of weight 0, which compares the held-out solutions."""
    pairs = {"estimator": "minimum_risk_mean", "params": {"alpha": 4.0}}
    compared = {"name": COMPARED, "fn": "logic", "weight": 0.0, **pairs}
    match arm:
        case "cross-entropy":
            return [compared]
        case "candidates":
            return [{"name": "logic", "estimator": "score_function", **setting}, compared]
        case "shuffled":
            return [{"name": "shuffled", "fn": "shuffled_logic", **pairs, **setting}, compared]
        case _:
            return [{"name": "logic", **pairs, **setting}, compared]


def config(arm: str, setting: Mapping[str, Any], seed: int, split: str, folder: Path) -> SftConfig:
    """Return the config of one run; runs of a seed see the same batches and differ by their regularizers alone."""
    name = hashlib.sha256(json.dumps([arm, setting, NUM_STEPS], sort_keys=True).encode()).hexdigest()[:8]
    return SftConfig.model_validate(
        {
            "run_name": f"{split}-{arm}-{name}-{seed}",
            "model": "smollm2-135m",
            "storage": str(folder / "runs"),
            "tracking": f"sqlite:///{folder / 'mlflow.db'}",
            "experiment": "headline",
            "lora_rank": 16,
            "learning_rate": 5e-4,
            "lr_schedule": "constant",
            "seed": seed,
            "num_epochs": 100,  # num_steps ends the run earlier
            "num_steps": NUM_STEPS,
            "eval_every": 15,
            "checkpoint_every": 15,
            "data": {
                "builder": "benchmarks.headline:PairsBuilder",
                "params": {
                    "held_out": split,
                    "common_config": {"renderer_name": RENDERER, "max_length": 512, "batch_size": 2},
                },
            },
            "candidates": {"num": 4, "max_tokens": 96} if arm == "candidates" else "off",
            "objective": {"regularizers": terms(arm, setting)},
        }
    )


def measure_run(arm: str, setting: Mapping[str, Any], seed: int, split: str, folder: Path) -> dict[str, Any]:
    """Train or resume one run, and measure its final weights."""
    chosen = config(arm, setting, seed, split, folder)
    result = run(sft, chosen)
    points = MlflowClient(result.tracking_uri).get_metric_history(result.mlflow_run_id, f"test/term/{COMPARED}/value")
    with tinker.ServiceClient() as service:
        client = service.create_training_client_from_state(result.state_path).result()
        problems = read(split)
        renderer = get_renderer(RENDERER, client.get_tokenizer())
        right, wrong, num_tokens = _logprobs(client, problems, renderer)
        texts = _samples(client, problems, renderer)
    checked = [[_holds(*sides) for sides in _ANNOTATION.findall(text)] for text in texts]
    return {
        "split": split,
        "arm": arm,
        "setting": dict(setting),
        "seed": seed,
        "curve": {str(point.step): point.value for point in points},
        "margins": [a - b for a, b in zip(right, wrong, strict=True)],
        "nll": -sum(right) / sum(num_tokens),
        "annotations": [len(answers) for answers in checked],
        "true_annotations": [sum(answer is True for answer in answers) for answers in checked],
    }


def _logprobs(
    client: tinker.TrainingClient, problems: Sequence[Problem], renderer: Renderer
) -> tuple[list[float], list[float], list[int]]:
    """Return the logprobs of the right solutions and of their copies, and the number of tokens of the former."""
    data = [datum for problem in problems for datum in both_solutions(problem, renderer)]
    masks = [datum.loss_fn_inputs["weights"].to_torch() > 0 for datum in data]
    outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
    sums = [
        float(output["logprobs"].to_torch()[mask].double().sum()) for output, mask in zip(outputs, masks, strict=True)
    ]
    return sums[::2], sums[1::2], [int(mask.sum()) for mask in masks[::2]]


def _samples(client: tinker.TrainingClient, problems: Sequence[Problem], renderer: Renderer) -> list[str]:
    """Sample completions of the problems, with the same seeds for all weights."""
    sampler = client.save_weights_and_get_sampling_client().result()
    conversations = [[Message(role="user", content=problem.question)] for problem in problems]
    answers = asyncio.run(sample_answers(sampler, renderer, conversations, SAMPLING))
    return [answer.text for group in answers for answer in group]


def run_all(folder: Path, path: Path = RESULTS) -> list[dict[str, Any]]:
    """Run everything that the file of results lacks; return the lines of the file.

    Args:
        folder: folder of the run directories.
        path: file of results.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = read_lines(path)

    def ensure(arm: str, setting: Mapping[str, Any], seed: int, split: str) -> None:
        key = (arm, setting, seed, split)
        if any((line["arm"], line["setting"], line["seed"], line["split"]) == key for line in lines):
            return
        lines.append(measure_run(arm, setting, seed, split, folder))
        with path.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
        print(f"{split} {arm} {setting} seed {seed}: {_figures([lines[-1]])}", flush=True)

    with (
        bench_engine(folder, "smollm2-135m", threads=torch.get_num_threads()) as url,
        environment(TINKER_BASE_URL=url, TINKER_API_KEY=KEY),
    ):
        for arm, settings in ARMS.items():
            for setting in settings:
                for seed in EXPLORATION_SEEDS:
                    ensure(arm, setting, seed, "explore")
        for seed in SEEDS:
            for arm in ARMS:
                ensure(arm, choose(lines, arm), seed, "confirm")
    return lines


def choose(lines: Sequence[Mapping[str, Any]], arm: str) -> Mapping[str, Any]:
    """Return the setting of an arm that prefers the most right solutions in the exploration.

    Settings that raise the NLL of right solutions by more than `MAX_NLL_RISE` above cross-entropy are left out, if
    others remain. Equal shares are decided by the margin.
    """
    explored = [line for line in lines if line["split"] == "explore"]
    limit = fmean(line["nll"] for line in explored if line["arm"] == "cross-entropy") + MAX_NLL_RISE

    def rank(setting: Mapping[str, Any]) -> tuple[bool, float, float]:
        runs = [line for line in explored if line["arm"] == arm and line["setting"] == setting]
        margins = [margin for line in runs for margin in line["margins"]]
        within = fmean(line["nll"] for line in runs) <= limit
        return within, fmean(margin > 0 for margin in margins), fmean(margins)

    return choose(lines, "data") if arm == "shuffled" else max(ARMS[arm], key=rank)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the results of finished runs; empty if the file does not exist."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean with a 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def interval(values: Iterable[float]) -> Interval:
    """Return the mean of independent values with its t interval."""
    sample = np.array(list(values))
    mean, error = float(sample.mean()), float(stats.sem(sample))
    if error == 0:
        return Interval(mean, mean, mean)
    low, high = stats.t.interval(0.95, len(sample) - 1, mean, error)
    return Interval(mean, float(low), float(high))


def preferred(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return for each held-out problem the share of seeds whose model prefers the right solution."""
    return np.mean([np.array(line["margins"]) > 0 for line in lines], axis=0).tolist()


def margins(lines: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return for each held-out problem the mean margin over the seeds, in nats."""
    return np.mean([line["margins"] for line in lines], axis=0).tolist()


def validity(lines: Sequence[Mapping[str, Any]]) -> Interval:
    """Return the share of true annotations among all sampled ones, with an interval from resampled problems."""
    num_samples = SAMPLING.num_samples
    counts = np.array([[line["true_annotations"], line["annotations"]] for line in lines], dtype=float)
    by_problem = counts.reshape(len(lines), 2, -1, num_samples).sum(axis=(0, 3))
    share = by_problem[0].sum() / max(1.0, by_problem[1].sum())
    generator = np.random.default_rng(0)
    drawn = generator.integers(0, by_problem.shape[1], (2000, by_problem.shape[1]))
    resampled = by_problem[0][drawn].sum(axis=1) / by_problem[1][drawn].sum(axis=1).clip(min=1)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Interval(float(share), float(low), float(high))


def _figures(lines: Sequence[Mapping[str, Any]]) -> str:
    num = sum(sum(line["annotations"]) for line in lines) / sum(len(line["annotations"]) for line in lines)
    return (
        f"preferred {interval(preferred(lines))}, margin {interval(margins(lines))} nats, true annotations "
        f"{validity(lines)}, {num:.2f} per completion, NLL {fmean(line['nll'] for line in lines):.3f}"
    )


def confirmed(lines: Sequence[Mapping[str, Any]], arm: str) -> list[Mapping[str, Any]]:
    """Return the confirming runs of an arm."""
    return [line for line in lines if line["split"] == "confirm" and line["arm"] == arm]


def table(lines: Sequence[Mapping[str, Any]]) -> Table:
    """Return one row per arm: the confirming runs on held-out problems, with 95 % intervals over problems."""
    result = Table(
        title=f"headline: {len(SEEDS)} seeds, {len(read('confirm'))} held-out problems", title_justify="left"
    )
    for column in ("arm", "setting", "right preferred", "margin, nats", "true annotations", "per completion", "NLL"):
        result.add_column(column)
    for arm in ARMS:
        runs = confirmed(lines, arm)
        setting = ", ".join(f"{key} {value}" for key, value in runs[0]["setting"].items())
        num = sum(sum(line["annotations"]) for line in runs) / sum(len(line["annotations"]) for line in runs)
        figures = (interval(preferred(runs)), interval(margins(runs)), validity(runs))
        nll = fmean(line["nll"] for line in runs)
        result.add_row(arm, setting, *map(str, figures), f"{num:.2f}", f"{nll:.3f}")
    return result


def draw(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the held-out share of false annotations over the steps, and two final measures of each arm, as PNG."""
    figure = Figure(figsize=(10, 3.4), dpi=110, layout="constrained")
    over_steps, margin, valid = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))
    # Okabe and Ito's palette, which colour-blind readers can tell apart.
    colors = dict(zip(ARMS, ("#000000", "#0072B2", "#009E73", "#E69F00", "#999999"), strict=True))
    for number, arm in enumerate(ARMS):
        runs = confirmed(lines, arm)
        steps = sorted(int(step) for step in runs[0]["curve"])
        curves = np.array([[line["curve"][str(step)] for step in steps] for line in runs])
        over_steps.plot(steps, curves.mean(axis=0), color=colors[arm], label=arm, marker=".")
        over_steps.fill_between(steps, curves.min(axis=0), curves.max(axis=0), color=colors[arm], alpha=0.15)
        for panel, shown in ((margin, interval(margins(runs))), (valid, validity(runs))):
            bars = [[shown.mean - shown.low], [shown.high - shown.mean]]
            panel.errorbar([shown.mean], [-number], xerr=bars, fmt="o", color=colors[arm], capsize=3)
    over_steps.set(xlabel="step", ylabel="logic score of held-out pairs")
    over_steps.legend(frameon=False, fontsize=8)
    margin.set(xlabel="margin, nats", yticks=range(0, -len(ARMS), -1), yticklabels=list(ARMS))
    margin.set_xlim(left=0)
    valid.set(xlabel="true of sampled annotations", yticks=[], xlim=(0, None))
    for panel in (over_steps, margin, valid):
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def measure() -> Table:
    """Return the table of all arms; see `run_all`."""
    return table(run_all(home() / "headline"))


def main() -> None:
    """Draw the results that exist; `python -m benchmarks headline` runs what is missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.headline", description=main.__doc__)
    parser.add_argument("--plot", type=Path, required=True, help="PNG file of the picture")
    arguments, lines = parser.parse_args(), read_lines(RESULTS)
    if not any(line["split"] == "confirm" for line in lines):
        parser.error(f"{RESULTS} has no confirming run: run `python -m benchmarks headline` first")
    draw(lines, arguments.plot)


if __name__ == "__main__":
    main()
