"""Supervised fine-tuning with a structured objective.

python -m flows.sft --config examples/sft.yaml learning_rate=1e-4
"""

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import cast

from prefect import flow
from pydantic import Field
from tinker_cookbook.eval.evaluators import Evaluator
from tinker_cookbook.utils.lr_scheduling import LRSchedule, compute_schedule_lr_multiplier

from flows.command_line import main
from flows.config import AdamConfig, BuilderConfig, RunConfig
from flows.progress import Progress
from flows.result import TrainResult, finish
from flows.run import Run, open_run
from flows.segments import in_segments
from flows.step import compute_linearized, enqueue_forward_ahead, load_ahead
from flows.warn import warn
from objectives.batch import Batch
from objectives.linearize import Linearized
from objectives.losses import compute_mean_nll
from objectives.objective import Objective
from objectives.spec import ObjectiveSpec
from tasks.checkpoint import PendingCheckpoint, enqueue_checkpoint, record_checkpoint
from tasks.data import DataSource, build_dataset
from tasks.evaluate import HeldOutNLL, build_evaluator, evaluate
from tasks.features import load_features, save_features
from tasks.metrics import log_metrics
from tasks.options import whole
from tasks.terms import linearize_terms
from tasks.update import PendingUpdate, enqueue_update, forward_backward, optim_step


class SftConfig(RunConfig):
    """A supervised fine-tuning run."""

    data: BuilderConfig = Field(
        title="Data", description="A tinker-cookbook SupervisedDatasetBuilder and its parameters."
    )
    objective: ObjectiveSpec = Field(
        default=ObjectiveSpec(), title="Objective", description="The base loss and its weighted regularizers."
    )
    lora_rank: int = Field(default=32, ge=1, title="LoRA rank", description="Rank of the trained adapter.")
    seed: int = Field(default=0, ge=0, title="Seed", description="Of the adapter's start and the order of the data.")
    learning_rate: float = Field(default=1e-4, gt=0, title="Learning rate", description="At the first step.")
    lr_schedule: LRSchedule = Field(
        default="linear", title="Learning-rate schedule", description="How it falls to the last step."
    )
    adam: AdamConfig = Field(default=AdamConfig(), title="Optimizer", description="AdamW's other parameters.")
    num_epochs: int = Field(default=1, ge=1, title="Epochs", description="Passes over the data.")
    num_steps: int | None = Field(
        default=None,
        ge=1,
        title="Steps",
        description="Stop after so many steps; unset means after the epochs.",
    )
    eval_every: int = Field(
        default=10,
        ge=0,
        title="Evaluate every",
        description="Steps between evaluations, and at the end; 0 is never.",
    )
    evaluators: tuple[BuilderConfig, ...] = Field(
        default=(),
        title="Evaluators",
        description="tinker-cookbook evaluators beside the held-out `test/nll`.",
    )


@flow(name="sft", flow_run_name="{config.run_name}")
def sft(config: SftConfig) -> TrainResult:
    """Fine-tune a model on the data of a builder, from the start of the run or its last checkpoint."""
    with Objective.from_spec(config.objective) as objective:
        objective.check_needs()
        evaluators = [build_evaluator(each.builder, each.params) for each in config.evaluators]

        def attempt(restarts: Sequence[str]) -> TrainResult:
            with open_run(config, restarts, lora_rank=config.lora_rank, seed=config.seed) as run:
                source = build_dataset(config.data.builder, config.data.params, run.client.get_tokenizer(), config.seed)
                held_out = [HeldOutNLL(source.test)] if source.test is not None else []
                return train(run, config, source, objective, [*held_out, *evaluators])

        return in_segments(config, attempt)


@dataclass(frozen=True, slots=True)
class Sent:
    """A step whose update is under way, and the save behind it where one is due."""

    update: PendingUpdate
    learning_rate: float
    linearized: Linearized | None
    saving: PendingCheckpoint | None


def train(
    run: Run, config: SftConfig, source: DataSource, objective: Objective, evaluators: Sequence[Evaluator]
) -> TrainResult:
    """Run every step that is left, then leave the final checkpoint and the report."""
    steps_per_epoch = len(source.train)
    num_steps = min(config.num_epochs * steps_per_epoch, config.num_steps or sys.maxsize)
    last = run.start
    load_features(objective.runner.cache, run.directory)
    objective.restore(last.extra.get("objective", {}) if last else {})
    first = int(last.batch or 0) if last else 0

    def send(step: int, batch: Batch, linearized: Linearized | None) -> Sent:
        learning_rate = config.learning_rate * compute_schedule_lr_multiplier(config.lr_schedule, step, num_steps)
        loss_weights_DT = linearized.loss_weights_DT if linearized else batch.weights_DT
        update = enqueue_update(run.client, batch, loss_weights_DT, config.adam.at(learning_rate))
        saving = None
        if step + 1 == num_steps or is_due(step + 1, config.checkpoint_every):
            epoch = (step + 1) // steps_per_epoch
            saving = enqueue_checkpoint(run.client, step + 1, epoch, final=step + 1 == num_steps)
        return Sent(update, learning_rate, linearized, saving)

    following = load_ahead(source, objective, first) if first < num_steps else None
    forward = following and enqueue_forward_ahead(run.client, objective, following)
    next_sent: Sent | None = None
    with Progress(config.run_name, first, num_steps) as progress:
        for step in range(first, num_steps):
            started = perf_counter()
            assert following is not None
            ahead, sent = following, next_sent
            # Waited for before the next is loaded: a dataset has one place and one epoch.
            batch = forward.batch if forward else ahead.batch.result()
            # Before the next batch is loaded: evaluators share its tokenizer, which is not to be used by two threads.
            metrics = _evaluate(run, evaluators, step) if is_due(step, config.eval_every) else {}
            following = load_ahead(source, objective, step + 1) if step + 1 < num_steps else None

            if sent is None:
                linearized = compute_linearized(objective, ahead, forward, num_steps, step == 0) if forward else None
                sent = send(step, batch, linearized)
            forward = following and enqueue_forward_ahead(run.client, objective, following)
            # An update that waits for no forward pass is sent while the one before it is computed, except
            # where an evaluation has to see the weights between the two.
            pipelined = following and not forward and not is_due(step + 1, config.eval_every)
            next_sent = send(step + 1, following.batch.result(), None) if following and pipelined else None

            outputs = forward_backward(sent.update.forward_backward, whole(batch))
            metrics |= optim_step(sent.update.optim_step)
            linearized = sent.linearized or linearize_terms(objective, outputs, whole(batch), [], step)
            metrics |= linearized.metrics | {
                "train_mean_nll": compute_mean_nll(outputs.logprobs_DT, batch.weights_DT),
                "num_tokens": batch.num_tokens,
                "optim/lr": sent.learning_rate,
                "progress/epoch": step // steps_per_epoch,
                "progress/done_frac": (step + 1) / num_steps,
                "time/step": perf_counter() - started,
            }
            log_metrics(run.log, step, whole(metrics))
            warn(run.log, objective.watch.take_warnings())
            if step + 1 == num_steps and config.eval_every:
                log_metrics(run.log, num_steps, _evaluate(run, evaluators, num_steps))
            if sent.saving:
                save_features(objective.runner.cache, run.directory)
                last = record_checkpoint(sent.saving, run.directory, run.log, objective.state())
            progress.advance(metrics)
    assert last is not None
    return finish(run, config.run_name, last, first)


def _evaluate(run: Run, evaluators: Sequence[Evaluator], step: int) -> dict[str, float]:
    # Submitted, because an async task called by a synchronous flow is never run.
    return cast("dict[str, float]", evaluate.submit(run.client, evaluators, step).result())


def is_due(step: int, every: int) -> bool:
    """True at every `every`-th step, the first one included; 0 is never."""
    return every > 0 and step % every == 0


if __name__ == "__main__":
    main(sft, SftConfig)
