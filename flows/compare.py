"""Compare two policies on the same questions: KL, perplexity, entropy, diversity and win rate.

python -m flows.compare --config examples/compare.yaml checkpoint=RUN@best
"""

if __name__ == "__main__":  # first, so that --help does not wait for the imports below
    from flows.runs.cli import main

    main("flows.compare:compare", "flows.compare:CompareConfig", __doc__, show="flows.compare:show_comparison")

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
from dataclasses import dataclass
from typing import cast

from prefect import flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run
from pydantic import Field
from rich.table import Table

from blocks.errors import ConfigError
from blocks.terminal import TextConsole
from blocks.urls import hide_credentials
from flows.config.base import (
    BASE,
    CHECKPOINT,
    CHECKPOINT_HELP,
    BuilderConfig,
    NamedConfig,
    TrackedConfig,
    WeightsConfig,
)
from flows.runs.blocks import open_service, storage_of
from flows.runs.checkpoints.checkpoint_refs import find_checkpoint, with_model
from flows.runs.rights import apply_rights
from flows.runs.tracking.mlflow_run import open_measurement
from tasks.common.jsonl import read_rows
from tasks.common.prompt_scores import supports_last_n
from tasks.common.sampling import Sampling, open_renderer, open_sampler
from tasks.common.tokenizers import encode_alike
from tasks.evaluation.policy_comparison import PolicyComparison, compare_policies
from tasks.preference.judges import build_judge
from tasks.reports.tables import write_samples, write_table


class CompareConfig(WeightsConfig, TrackedConfig, NamedConfig):
    """Comparison of two policies on a file of questions."""

    checkpoint: str = Field(title="Checkpoint", description=CHECKPOINT_HELP, pattern=CHECKPOINT)
    against: str = Field(
        default=BASE,
        title="Against",
        description=f"Weights to compare with: {CHECKPOINT_HELP}",
        pattern=CHECKPOINT,
    )
    path: str = Field(
        title="Questions",
        description="JSONL file with a `question` per row. Rows can also have an `answer`, on which the perplexity is "
        "measured and which a judge can read.",
    )
    limit: int | None = Field(
        default=None,
        ge=1,
        title="Limit",
        description="Number of rows to use, from the start of the file. Unset: all rows.",
    )
    renderer_name: str = Field(
        title="Renderer",
        description="Chat format of the model, a renderer of tinker-cookbook.",
        examples=["qwen3_instruct"],
    )
    num_samples: int = Field(default=4, ge=1, title="Samples", description="Completions per question and policy.")
    max_tokens: int = Field(default=256, ge=1, title="Tokens", description="Maximum tokens per completion.")
    seed: int = Field(default=0, ge=0, title="Seed", description="Sampling seed.")
    judge: BuilderConfig | None = Field(
        default=None,
        title="Judge",
        description="Judge of two completions: a function such as `tinker_flows:by_answer`, which compares them with "
        "the row's `answer`, or a `PreferenceModel` or `MessageCompleter` of tinker-cookbook.",
    )


@dataclass(frozen=True, slots=True)
class CompareResult:
    """Result of a comparison; `metrics` contains the values logged to MLflow."""

    run_name: str
    metrics: dict[str, float]
    rows: list[tuple[str, float | None, float | None]]
    flow_run_id: str
    tracking_uri: str
    mlflow_run_id: str


@flow(name="compare", flow_run_name="{config.run_name}", on_running=[apply_rights])
def compare(config: CompareConfig) -> CompareResult:
    """Sample completions of two policies for the same questions and measure how they differ."""
    storage = storage_of(config)
    checkpoint, against = (find_checkpoint(name, storage) for name in (config.checkpoint, config.against))
    config = with_model(config, checkpoint, against)
    questions = read_rows(config.path, ("question",), config.limit)
    # Temperature 1: estimates from the samples then describe the policies themselves.
    sampling = Sampling(config.num_samples, config.max_tokens, 1.0, config.seed)
    with open_service(config) as service:
        service.check_model(config.model)
        tags = {"tinker.checkpoint": checkpoint.path or config.model, "tinker.against": against.path or config.model}
        with open_measurement(config, config.run_name, service.resolved_url, tags) as log, service.session() as session:
            first, tokenizer = open_sampler(session, checkpoint.path, config.model)
            second, other_tokenizer = open_sampler(session, against.path, config.model)
            if not encode_alike(tokenizer, other_tokenizer):
                raise ConfigError(
                    f"{config.checkpoint} and {config.against} have different tokenizers: compare weights of models "
                    "with the same tokenizer."
                )
            renderer = open_renderer(config.renderer_name, tokenizer)
            judge = build_judge(config.judge.builder, config.judge.params) if config.judge else None
            can_score_last_n = supports_last_n(first)
            if not can_score_last_n:
                get_run_logger().warning(
                    "The service does not know prompt_logprobs_last_n, so it also scores the tokens of the prompts."
                )
            # Submitted: a synchronous flow cannot call an async task directly.
            pending = compare_policies.submit((first, second), questions, renderer, sampling, judge, can_score_last_n)
            compared = cast(PolicyComparison, pending.result())
            log.log(checkpoint.step, compared.metrics)
            log.flush()
            write_samples(log, ("question", "sample", "checkpoint", "against", "verdict"), compared.samples)
            columns = ("metric", config.checkpoint, config.against)
            write_table(log, "comparison", config.run_name, columns, compared.rows)
    return CompareResult(
        run_name=config.run_name,
        metrics=compared.metrics,
        rows=compared.rows,
        flow_run_id=flow_run.get_id() or "",
        tracking_uri=hide_credentials(log.client.tracking_uri),
        mlflow_run_id=log.run_id,
    )


def show_comparison(result: CompareResult) -> None:
    """Print the metrics of both policies side by side."""
    table = Table(title=result.run_name)
    for index, column in enumerate(("metric", "checkpoint", "against")):
        table.add_column(column, justify="right" if index else "left")
    for name, *values in result.rows:
        table.add_row(name, *("" if value is None else f"{value:.6g}" for value in values))
    console = TextConsole()
    console.print(table)
    console.print(f"MLflow run   {result.mlflow_run_id} at {result.tracking_uri}")
