"""Comparison of two policies on the same questions: KL, perplexity, entropy, diversity and the rate of wins.

python -m flows.compare --config examples/compare.yaml checkpoint=RUN@best
"""

# No postponed annotations here: Prefect reads the flow's types from this file without importing it as a module.
from dataclasses import dataclass
from typing import cast

from prefect import flow
from prefect.runtime import flow_run
from pydantic import Field
from rich.console import Console
from rich.table import Table

from flows.blocks_of import service_of, storage_of
from flows.command_line import main
from flows.config import BuilderConfig, NamedConfig, TrackedConfig
from flows.measured import open_measurement
from flows.named_checkpoint import BASE, CHECKPOINT, WHAT, WeightsConfig, find_checkpoint, with_model
from tasks.compare import Compared, compare_policies
from tasks.judges import build_judge
from tasks.result_table import write_samples, write_table
from tasks.rows import read_rows
from tasks.sample import Sampling, open_renderer
from tasks.weights import open_sampler


class CompareConfig(WeightsConfig, TrackedConfig, NamedConfig):
    """Two policies, and what they are asked."""

    checkpoint: str = Field(title="Checkpoint", description=WHAT, pattern=CHECKPOINT)
    against: str = Field(
        default=BASE, title="Against", description=f"What it is compared with: {WHAT}", pattern=CHECKPOINT
    )
    path: str = Field(
        title="Questions",
        description="JSONL file with a `question` per row; its `answer`, where it has one, is what the perplexity is "
        "of and what a judge may know.",
    )
    limit: int | None = Field(default=None, ge=1, title="Limit", description="Ask so many questions only.")
    renderer_name: str = Field(
        title="Renderer",
        description="The model's chat format, a renderer of tinker-cookbook.",
        examples=["qwen3_instruct"],
    )
    num_samples: int = Field(default=4, ge=1, title="Samples", description="Answers of each policy to a question.")
    max_tokens: int = Field(default=256, ge=1, title="Tokens", description="The most in one answer.")
    seed: int = Field(default=0, ge=0, title="Seed", description="Of the sampling.")
    judge: BuilderConfig | None = Field(
        default=None,
        title="Judge",
        description="Says which of two answers is better: `tasks.judges:by_answer` by the row's `answer`; a function, "
        "a PreferenceModel or a MessageCompleter of tinker-cookbook.",
    )


@dataclass(frozen=True, slots=True)
class CompareResult:
    """What a comparison found; `metrics` has every figure, as MLflow does."""

    run_name: str
    metrics: dict[str, float]
    rows: list[tuple[str, float | None, float | None]]
    flow_run_id: str
    tracking_uri: str
    mlflow_run_id: str


@flow(name="compare", flow_run_name="{config.run_name}")
def compare(config: CompareConfig) -> CompareResult:
    """Ask two policies the same questions and measure how their answers differ."""
    storage = storage_of(config)
    chosen, against = (find_checkpoint(name, storage) for name in (config.checkpoint, config.against))
    config = with_model(config, chosen, against)
    questions = read_rows(config.path, ("question",), config.limit)
    judge = build_judge(config.judge.builder, config.judge.params) if config.judge else None
    # The policies as they are, so that what is estimated on their answers is about them.
    sampling = Sampling(config.num_samples, config.max_tokens, 1.0, config.seed)
    with service_of(config) as service:
        service.check_model(config.model)
        tags = {"tinker.checkpoint": chosen.path or config.model, "tinker.against": against.path or config.model}
        with open_measurement(config, config.run_name, service.resolved_url, tags) as log, service.session() as session:
            first, tokenizer = open_sampler(session, chosen.path, config.model)
            second, _ = open_sampler(session, against.path, config.model)
            renderer = open_renderer(config.renderer_name, tokenizer)
            # Submitted, because an async task called by a synchronous flow is never run.
            pending = compare_policies.submit((first, second), questions, renderer, sampling, judge)
            compared = cast(Compared, pending.result())
            log.log(chosen.step, compared.metrics)
            log.flush()
            write_samples(log, ("question", "sample", "checkpoint", "against", "verdict"), compared.samples)
            columns = ("metric", config.checkpoint, config.against)
            write_table(log, "comparison", config.run_name, columns, compared.rows)
    return CompareResult(
        run_name=config.run_name,
        metrics=compared.metrics,
        rows=compared.rows,
        flow_run_id=flow_run.get_id() or "",
        tracking_uri=log.client.tracking_uri,
        mlflow_run_id=log.run_id,
    )


def show_comparison(result: CompareResult) -> None:
    """Print the figures of both, side by side."""
    table = Table(title=result.run_name)
    for index, column in enumerate(("metric", "checkpoint", "against")):
        table.add_column(column, justify="right" if index else "left")
    for name, *values in result.rows:
        table.add_row(name, *("" if value is None else f"{value:.6g}" for value in values))
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"MLflow run   {result.mlflow_run_id} at {result.tracking_uri}")


if __name__ == "__main__":
    main(compare, CompareConfig, show=show_comparison)
