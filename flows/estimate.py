"""What a run will take, before it runs: its steps, tokens, passes, cost, and its time at an earlier run's pace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlflow.entities import Run
from tinker_cookbook.tokenizer_utils import Tokenizer

from flows.blocks_of import service_of, tracking_of
from flows.dpo import DpoConfig, open_pairs, preference_loss
from flows.plan import Plan
from flows.prices import price_of
from flows.sft import GIVEN, SftConfig
from flows.step import num_passes
from objectives.objective import Objective
from tasks.data import DataSource, build_dataset
from tasks.evaluate import HeldOutNLL
from tasks.pairs import HeldOutPairs, PairSource
from tasks.service_errors import service_errors

# Reading a batch makes its tokens anew: beyond so many, those of the others are taken to be as many on the mean.
_MOST_BATCHES = 1000


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a whole run will take.

    Attributes:
        run_name, model: which run.
        num_steps: its updates.
        num_tokens: in the batches of all steps.
        batches_read, batches_of_epoch: of how many batches of how many the tokens were counted; the others are taken to
            be like them.
        num_forwards: passes without a gradient, one per step that needs the logprobs first.
        num_forward_backwards: passes with one.
        num_evaluations: passes over the held-out data.
        num_held_out_tokens: in the held-out data.
        num_train_tokens: in all of these passes, which is what the service bills.
        usd: for them; None where nobody said a price. What evaluators sample is not in it, nor what is stored.
        hours: at the pace of `paced_by`; None where there is none.
        paced_by: the newest run of the same model that MLflow knows; empty where there is none.
    """

    run_name: str
    model: str
    num_steps: int
    num_tokens: int
    batches_read: int
    batches_of_epoch: int
    num_forwards: int
    num_forward_backwards: int
    num_evaluations: int
    num_held_out_tokens: int
    num_train_tokens: int
    usd: float | None
    hours: float | None
    paced_by: str


def estimate(config: SftConfig | DpoConfig) -> Estimate:
    """Read the data with the model's tokenizer and count; nothing is trained.

    Raises:
        ConfigError: whatever the run itself would refuse about its config, data or prices.
        ServiceError: the service does not answer.
    """
    price = price_of(config.model, config.base_url, config.budget.prices)
    with Objective.from_spec(config.objective) as objective, service_of(config) as service:
        objective.check_needs(GIVEN)
        service.check_model(config.model)
        with service.session() as session:
            with service_errors(f"create a training client for {config.model}"):
                client = session.create_lora_training_client(config.model, rank=config.lora_rank).result()
            source, held_out = _open(config, objective, client.get_tokenizer())
    plan = Plan(config, source.steps_per_epoch)
    tokens = _tokens_of_steps(source, plan)
    passes = [num_passes(objective, step, config.guards.looks_first) for step in range(plan.num_steps)]
    evaluations = sum(plan.evaluates_before(step) for step in range(plan.num_steps + 1)) if held_out else 0
    held_out = held_out if evaluations else 0
    num_train_tokens = sum(a * b for a, b in zip(tokens, passes, strict=True)) + evaluations * held_out
    if objective.needs("ref_logprobs"):
        # The reference goes over each datum once, and over held-out pairs.
        num_train_tokens += sum(tokens[: plan.steps_per_epoch]) + (held_out if isinstance(source, PairSource) else 0)
    # The last weights are looked at once more, on the last batch.
    num_train_tokens += tokens[-1]
    run, pace = _pace(config)
    return Estimate(
        run_name=config.run_name,
        model=config.model,
        num_steps=plan.num_steps,
        num_tokens=sum(tokens),
        batches_read=min(len(tokens), plan.steps_per_epoch, _MOST_BATCHES),
        batches_of_epoch=plan.steps_per_epoch,
        num_forwards=sum(passes) - len(passes) + 1,
        num_forward_backwards=len(passes),
        num_evaluations=evaluations,
        num_held_out_tokens=held_out,
        num_train_tokens=num_train_tokens,
        usd=price.of_training(num_train_tokens) if price else None,
        hours=sum(tokens) / pace / 3600 if pace else None,
        paced_by=run,
    )


def _open(
    config: SftConfig | DpoConfig, objective: Objective, tokenizer: Tokenizer
) -> tuple[DataSource | PairSource, int]:
    """What a run trains on, and how many tokens are held out."""
    if isinstance(config, DpoConfig):
        loss = preference_loss(objective)
        pairs, test = open_pairs(config, loss, tokenizer)
        return pairs, HeldOutPairs(test, loss, None).num_tokens if test else 0
    source = build_dataset(config.data.builder, config.data.params, tokenizer, config.seed)
    return source, HeldOutNLL(source.test, tokenizer).num_tokens if source.test else 0


def _tokens_of_steps(source: DataSource | PairSource, plan: Plan) -> Sequence[int]:
    """The tokens of each step's batch: counted in the first epoch, and taken to be the same in every other."""
    per_epoch = plan.steps_per_epoch
    read = [source.batch_at(step).num_tokens for step in range(min(plan.num_steps, per_epoch, _MOST_BATCHES))]
    mean = round(sum(read) / len(read))
    return [
        read[index] if index < len(read) else mean for index in (step % per_epoch for step in range(plan.num_steps))
    ]


def _pace(config: SftConfig | DpoConfig) -> tuple[str, float]:
    """The newest run of the same model in the experiment, and the tokens of its batches per second; 0 for none."""
    tracking = tracking_of(config)
    client = tracking.get_client()
    with tracking.failures():
        name = config.model.replace("'", "")
        runs: Sequence[Run] = client.search_runs([tracking.experiment_id(client)], f"params.model = '{name}'")
        for run in runs:
            tokens, seconds = (
                {point.step: point.value for point in client.get_metric_history(run.info.run_id, key)}
                for key in ("num_tokens", "time/step")
            )
            # The first step of a part also waits for what the others find ready.
            later = sorted(tokens.keys() & seconds.keys())[1:]
            if total := sum(seconds[step] for step in later):
                return run.info.run_name or run.info.run_id, sum(tokens[step] for step in later) / total
    return "", 0.0
