"""Report of a run: one self-contained interactive page, saved to the run's directory, MLflow and Prefect."""

from __future__ import annotations

import html
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run

from blocks.storage import RunDirectory
from objectives.gradients.sensitivity import Gradients, factor_of_half, respond
from objectives.term import BASE
from tasks.common.task import retried_task
from tasks.reports.examples import examples_section
from tasks.reports.html import (
    DESCRIPTION_TAG,
    artifact_key,
    copyable,
    escape_markdown,
    flow_run_link,
    html_charts,
    html_list,
    html_page,
    html_section,
    html_table,
    markdown_code,
    markdown_table,
    mlflow_artifact_link,
    page_script,
)
from tasks.reports.summary import RunSummary, summarize
from tasks.reports.tables import (
    REWARD,
    TARGET_COLUMNS,
    Control,
    HeldOutRow,
    History,
    TargetRow,
    TermRow,
    cosine_key,
    describe_intervals,
    format_figure,
    held_out_table,
    is_headline,
    recent_term_rows,
    reward_parts,
    term_table,
)
from tasks.training.examples import read_examples
from tasks.training.held_out import read_batch_values
from tasks.training.tracking.metric_names import safe_name
from tasks.training.tracking.metrics import MetricsLog

if TYPE_CHECKING:
    from tasks.reports.charts import Chart, DrawnRun

FACTORS = (0.5, 2.0, 10.0)
WINDOW = 20
SENSITIVITY_COLUMNS = (
    "term",
    *(f"share at weight x{factor:g}" for factor in FACTORS),
    *(f"cosine of the total to the base at x{factor:g}" for factor in FACTORS),
    "factor for half of the gradient",
)
SENSITIVITY_NOTE = (
    "Effect of changing one term's weight while all other weights stay the same: medians over the last "
    f"{WINDOW} steps (all of a shorter run), and in brackets the range of the factor. Steps at which the term has no "
    "gradient are left out, so the shares may be larger than the means in the table of the terms."
)
_MAX_PARTS = 12
_LARGEST_FACTOR = 1000.0  # of a weight, that is worth naming


@dataclass(frozen=True, slots=True)
class MetricChart:
    """Metric that a report draws if a run has it.

    Attributes:
        train: key of the metric of a training step; empty for none.
        held_out: key of the metric of an evaluation; empty for none.
    """

    title: str
    unit: str
    reading: str
    train: str = ""
    held_out: str = ""


_RESULTS = (
    MetricChart(
        "Reward", "reward per episode", "Total reward of an episode; higher is better.", REWARD, f"test/{REWARD}"
    ),
    MetricChart(
        "Accuracy",
        "share of pairs",
        "Pairs whose chosen completion is preferred; 0.5 is chance. Ties, as before the first step, count as wrong.",
        "accuracy",
        "test/accuracy",
    ),
    MetricChart(
        "Margin", "reward", "Reward of the chosen minus that of the rejected completion.", "margin", "test/margin"
    ),
    MetricChart("Preference loss", "nats per pair", "Loss of the pairs; lower is better.", "dpo_loss", "test/dpo_loss"),
    MetricChart(
        "Distance to the teacher",
        "KL, nats per token",
        "Reverse KL to the teacher; 0 means that the student samples like the teacher.",
        "teacher_kl",
        "test/teacher_kl",
    ),
)
_LIKELIHOOD = MetricChart(
    "Negative log-likelihood",
    "nats",
    "Mean weighted by the data's weights: over examples if they are normalized per example, else over tokens.",
    "train_mean_nll",
    "test/nll",
)
_HEALTH = (
    MetricChart("Entropy", "nats per token", "A fall towards 0 means that all samples become alike.", "optim/entropy"),
    MetricChart(
        "Sampler against trainer",
        "KL, nats per token",
        "Difference of the logprobs at sampling and in training; it grows with stale samples.",
        "optim/kl_sample_train_v1",
    ),
    MetricChart(
        "Effective sample size",
        "share of the tokens",
        "Near 1, the samples are as good as samples of the current weights; near 0, a few of them decide.",
        "mismatch/ess",
    ),
    MetricChart(
        "Masked tokens", "share of the tokens", "Tokens that the correction for old samples drops.", "mismatch/masked"
    ),
    MetricChart(
        "Gradient norm", "norm by the weights", "Before clipping; a jump often precedes a collapse.", "optim/grad_norm"
    ),
    MetricChart(
        "Groups with different rewards",
        "share of groups",
        "Only these groups train the policy; near 0, nothing is learned.",
        "env/all/by_group/frac_mixed",
    ),
    MetricChart(
        "Groups sampled per trained group",
        "groups",
        "1 if every group teaches; refills sample further groups for those that do not.",
        "rollout/groups_per_trained",
    ),
    MetricChart(
        "Length of completions",
        "tokens per turn",
        "A steady drift without a better reward is a sign of reward hacking.",
        "env/all/ac_tokens_per_turn",
    ),
    MetricChart("Truncated completions", "share of completions", "They reached the token limit.", "rollout/truncated"),
    MetricChart(
        "Masked rollouts",
        "share of rollouts",
        "Truncated rollouts that are not trained on; their rewards count in their groups.",
        "rollout/masked",
    ),
    MetricChart(
        "Repeated 4-grams", "share", "A rise with the reward is a sign of reward hacking.", "rollout/repetition"
    ),
    MetricChart(
        "Stale groups", "share of groups", "They were too old to train on and are sampled again.", "async/stale_share"
    ),
    MetricChart(
        "Failed groups", "share of groups", "Their environments failed in all attempts.", "rollout_errors/share_skipped"
    ),
    MetricChart(
        "Time of environments", "seconds per group", "The rest of a rollout waits for samples.", "time/environment"
    ),
)
CHART_HINT = (
    '<p class="muted">Charts: drag to zoom, double-click to reset, click an entry of a legend to hide or show it. '
    "Step s comes after s completed steps, as in MLflow: a run of 24 steps trains on the batches of steps 0 to 23, and "
    "step 24 has its final weights.</p>"
)
_HEADER = """<h1>{name}</h1>
<p class="verdict">{verdict}</p>
{note}{facts}
{cards}
{warnings}"""


@dataclass(frozen=True, slots=True)
class ReportExtras:
    """Content of a report besides the metrics and tags of the run.

    Attributes:
        note: sentence at the top, such as the reason why no checkpoint was registered.
        targets: rows of the targets of terms and rewards.
        control: held-out values of a run without the terms, to show alongside those of this run.
        effect: further sentence on the effects of the terms; may be empty.
    """

    note: str = ""
    targets: Sequence[TargetRow] = ()
    control: Mapping[str, Control] | None = None
    effect: str = ""


@retried_task(name="report")
def write_report(
    directory: RunDirectory, log: MetricsLog, run_name: str, history: History, extras: ReportExtras
) -> str:
    """Write the report of a run and return its location."""
    mlflow_run = log.client.get_run(log.run_id)
    summary = summarize(run_name, mlflow_run, directory, history)
    page = _page(run_name, log, summary, extras, _sections(directory, history, summary, extras))
    directory.write_bytes("report.html", page.encode())
    log.client.log_text(log.run_id, page, "report.html")
    location = f"{directory.location}/report.html"
    link = flow_run_link() or _earlier_link(mlflow_run.data.tags.get(DESCRIPTION_TAG, ""))
    log.tag(DESCRIPTION_TAG, _description(summary, extras, location, link))
    log.flush()
    if flow_run.get_id():  # Prefect shows artifacts on the page of a flow run
        _create_artifact(run_name, location, log, report_markdown(summary, history, extras))
    return location


def _description(summary: RunSummary, extras: ReportExtras, location: str, link: str) -> str:
    """Description of the MLflow run, without a table of the terms, because MLflow charts their metrics."""
    links = f"{link}\n\nReport: {markdown_code(location)}, and `report.html` among the artifacts"
    return "\n\n".join(
        filter(None, [*_opening(summary, extras), *_facts_and_results(summary), links, _commands(summary)])
    )


def _earlier_link(description: str) -> str:
    """Link to the flow run in an earlier description, for a report that is built after the flow run; else empty."""
    return next((line for line in description.splitlines() if line.startswith("Prefect: ")), "")


def report_markdown(summary: RunSummary, history: History, extras: ReportExtras) -> str:
    """Verdict, warnings, tables and commands of a run in Markdown, for the page of its flow run."""
    title, rows = recent_term_rows(history)
    tables = _facts_and_results(summary)
    if rows:
        tables += [f"{title.capitalize()}:", markdown_table(*term_table(rows))]
    tables += [markdown_table(TARGET_COLUMNS, [row.format() for row in extras.targets])] if extras.targets else []
    if sensitivity := sensitivity_cells(history, [row.name for row in rows]):
        tables += [SENSITIVITY_NOTE, markdown_table(SENSITIVITY_COLUMNS, sensitivity)]
    return "\n\n".join(filter(None, [*_opening(summary, extras), *tables, _commands(summary)]))


def _opening(summary: RunSummary, extras: ReportExtras) -> list[str]:
    warnings = [f"- **Warning:** {escape_markdown(warning)}" for warning in summary.warnings]
    sentences = [summary.verdict, extras.note, *_effects(summary, extras)]
    return [*map(escape_markdown, sentences), "\n".join(warnings)]


def _effects(summary: RunSummary, extras: ReportExtras) -> list[str]:
    """Sentences on the effects of the terms; empty without a control."""
    return [describe_effects(summary.held_out, extras.control or {}), extras.effect]


def _facts_and_results(summary: RunSummary) -> list[str]:
    tables = [markdown_table(("run", ""), summary.facts)]
    if summary.held_out:
        tables += [
            markdown_table(*held_out_table(summary.held_out)),
            escape_markdown(describe_intervals(summary.held_out)),
        ]
    sentences = [*_changes_of_terms(summary), *(row.note for row in summary.held_out if row.note)]
    return [*tables, "\n".join(f"- {escape_markdown(sentence)}" for sentence in sentences)]


def _changes_of_terms(summary: RunSummary) -> list[str]:
    return [row.describe_change() for row in summary.held_out if row.is_of_term and row.is_compared]


def _reasons_of_rise(summary: RunSummary, terms: Sequence[TermRow], limits: Container[str]) -> list[str]:
    """Say about terms without a target whose held-out value rose what their gradient was up against."""
    others = " Other terms change it, too." if sum(row.weight > 0 and row.name != BASE for row in terms) > 1 else ""
    risen = {row.metric for row in summary.held_out if row.is_of_term and row.is_compared and row.change.is_rise}
    from_zero = {row.metric for row in summary.held_out if format_figure(row.before.value) in ("0", "≈0")}
    return [
        f"{row.name} rose {'from 0' if row.name in from_zero else 'although it is minimized'}: its share of the "
        f"gradient was {row.grad_share:.1%}, and the cosine of its gradient to that of the base loss "
        f"{row.cosine_to_base:+.2f}.{others}"
        for row in terms
        if row.name in risen and row.name not in limits and row.weight > 0 and not math.isnan(row.cosine_to_base)
    ]


def _commands(summary: RunSummary) -> str:
    return "\n".join(f"- {markdown_code(command)}" for _, command in summary.commands)


def _page(run_name: str, log: MetricsLog, summary: RunSummary, extras: ReportExtras, sections: Iterator[str]) -> str:
    notes = [extras.note, *_effects(summary, extras)]
    header = _HEADER.format(
        name=html.escape(run_name),
        verdict=html.escape(summary.verdict),
        note="".join(f"<p><b>{html.escape(text)}</b></p>\n" for text in notes if text),
        facts=_fact_list([*summary.facts, ("MLflow run", log.run_id)]),
        cards=_cards(summary.headlines),
        warnings=f'<div class="warnings"><b>Warnings</b>{warnings}</div>'
        if (warnings := html_list(summary.warnings))
        else "",
    )
    use = [copyable(text, label) for label, text in [("Newest weights", summary.weights), *summary.commands] if text]
    script = page_script(has_charts=True)
    return html_page(run_name, "\n".join([header, html_section("What next?", *use), *sections, script]))


def _sections(directory: RunDirectory, history: History, summary: RunSummary, extras: ReportExtras) -> Iterator[str]:
    """Sections of the page after its header."""
    from tasks.reports.charts import (  # Plotly takes long to import
        DrawnRun,
        draw_conflicts,
        draw_cosines,
        draw_shares,
        draw_term,
        order_by_share,
        term_colors,
    )

    run = DrawnRun(history, read_batch_values(directory))
    title, rows = recent_term_rows(history)
    names = order_by_share(run, [row.name for row in rows])
    yield CHART_HINT
    yield from metric_sections([run])
    limits = {row.name: row.target.limit for row in extras.targets}
    colors = term_colors(names)
    yield html_section(
        "What did each term do?",
        _headed_list("What they measure", _definitions(summary, names)),
        _headed_list(
            "Change of their held-out values during the run",
            [*_changes_of_terms(summary), *_reasons_of_rise(summary, rows, limits)],
        ),
        html_charts(draw_term([run], name, colors[name], limits.get(name)) for name in names if name != BASE),
        html_charts(draw(run, names) for draw in (draw_shares, draw_cosines, draw_conflicts) if len(names) > 1),
        f"<h3>{title.capitalize()}</h3>",
        html_table(*term_table(rows)),
        intro="Terms are minimized: lower is better, except for a term with a lower limit as its target.",
    )
    yield html_section(
        "Targets",
        html_table(TARGET_COLUMNS, [row.format() for row in extras.targets]) if extras.targets else "",
        intro="A target is met if the mean violates its limit by at most 10 % of its scale, or by at most half the "
        "width of the mean's 95 % interval.",
    )
    yield _held_out_section(summary.held_out, extras.control)
    yield examples_section(read_examples(directory))
    sensitivity = sensitivity_cells(history, names)
    yield html_section(
        "Sensitivity to the weights",
        html_table(SENSITIVITY_COLUMNS, sensitivity) if sensitivity else "",
        intro=SENSITIVITY_NOTE,
    )


def _headed_list(title: str, sentences: Sequence[str]) -> str:
    """HTML list below a heading; empty without sentences."""
    return f"<h3>{title}</h3>{html_list(sentences)}" if sentences else ""


def _definitions(summary: RunSummary, names: Sequence[str]) -> list[str]:
    known = summary.definitions
    return [f"{name}: {known[safe_name(name)]}" for name in names if safe_name(name) in known]


def metric_sections(runs: Sequence[DrawnRun]) -> Iterator[str]:
    """Sections with the results of the method, the parts of its reward, its health and the user's evaluators."""
    keys = {key for run in runs for key in run.history}
    trains_on_text = not keys & {REWARD, "accuracy"}
    results = [*_RESULTS, *([_LIKELIHOOD] if trains_on_text else [])]
    has_rewards = any(value for run in runs for _, value in run.history.get(REWARD, ()))
    # Distillation without rewards logs rewards of 0, which say nothing.
    is_distilled = "teacher_kl" in keys and not has_rewards
    if is_distilled:
        results = [metric for metric in results if metric.train != REWARD]
    yield html_section("Results", html_charts(_draw_all(runs, results)))
    yield html_section("Parts of the reward", html_charts(_draw_all(runs, _reward_parts(keys))))
    is_rl = REWARD in keys and not is_distilled
    yield html_section("Health of reinforcement learning", html_charts(_draw_all(runs, _HEALTH if is_rl else ())))
    yield html_section("Evaluators", html_charts(_draw_all(runs, _evaluations(keys))))


def _held_out_section(rows: Sequence[HeldOutRow], control: Mapping[str, Control] | None) -> str:
    """Section with a table of the held-out metrics before and after training, and of a control's metrics."""
    effect = (
        " Effect of the terms: after, minus the value of the control, a run that differs only in that its terms have "
        "the weight 0."
        if control
        else ""
    )
    return html_section(
        "Held-out data",
        html_table(*held_out_table(rows, control)) if rows else "",
        intro=" ".join(filter(None, [describe_intervals(rows) + effect, *(row.note for row in rows)])),
    )


def _draw_all(runs: Sequence[DrawnRun], metrics: Sequence[MetricChart]) -> Iterator[Chart | None]:
    from tasks.reports.charts import draw_metric

    for metric in metrics:
        yield draw_metric(runs, metric.title, metric.unit, metric.reading, train=metric.train, held_out=metric.held_out)


def _reward_parts(keys: set[str]) -> list[MetricChart]:
    parts = list(reward_parts(keys).items())[:_MAX_PARTS]
    return [MetricChart(name, "mean per episode", "Part of the reward.", key, f"test/{key}") for key, name in parts]


def _evaluations(keys: set[str]) -> list[MetricChart]:
    """Metrics of the user's evaluators."""
    drawn = {metric.held_out for metric in (*_RESULTS, _LIKELIHOOD)}
    own = sorted(key for key in keys if is_headline(key) and key not in drawn)
    return [MetricChart(key.removeprefix("test/"), "value", "Metric of an evaluator.", held_out=key) for key in own]


def describe_effects(rows: Sequence[HeldOutRow], control: Mapping[str, Control]) -> str:
    """Say in a sentence how the main held-out values differ from a control without the terms; empty without one."""
    shown = [row for row in rows if row.metric in control and (row.is_of_term or is_headline(f"test/{row.metric}"))]
    effects = {row.metric: row.compare(control[row.metric]) for row in shown}
    unclear = [name for name, effect in effects.items() if not effect.is_measurable]
    raised, lowered = (
        [
            f"{name} by {effect.size()}"
            for name, effect in effects.items()
            if name not in unclear and sign * effect.value > 0
        ]
        for sign in (1, -1)
    )
    parts = [f"{verb} {_and(names)}" for verb, names in (("raised", raised), ("lowered", lowered)) if names]
    if unclear:
        parts.append(f"did not measurably change {_and(unclear)}")
    changes = ", and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
    return f"Compared with a control without the terms, the terms {changes}." if changes else ""


def _and(items: Sequence[str]) -> str:
    """Join items in a sentence.

    >>> _and(["a", "b", "c"])
    'a, b and c'
    """
    *most, last = items
    return f"{', '.join(most)} and {last}" if most else last


def _fact_list(facts: Sequence[tuple[str, str]]) -> str:
    items = "".join(f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in facts)
    return f'<dl class="facts">{items}</dl>'


def _cards(rows: Sequence[HeldOutRow]) -> str:
    """Main held-out metrics before and after, one card each."""
    return f'<div class="cards">{"".join(_card(row) for row in rows)}</div>' if rows else ""


def _card(row: HeldOutRow) -> str:
    figures, steps = str(row.after), f"step {row.last_step} only"
    if row.is_compared:
        figures = f"{row.before} → {row.after}"
        steps = f"step {row.first_step} → step {row.last_step}, change {row.change.signed()}"
    return (
        f'<div class="card">{html.escape(row.metric)} on held-out data'
        f'<div class="figures">{html.escape(figures)}</div><span class="muted">{html.escape(steps)}</span></div>'
    )


def sensitivity_cells(history: History, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Text cells of the gradient's sensitivity to each weight; one row per regularizer with a gradient.

    Figures are medians over the last `WINDOW` steps, because the figures of a single batch swing widely. The range of
    the factor over these steps follows it.
    """
    points = {key: dict(steps) for key, steps in history.items()}
    steps = sorted(points.get(_norm_key(BASE), {}))[-WINDOW:]
    gradients = [_gradients_at(points, names, step) for step in steps]
    rows: list[tuple[str, ...]] = []
    for index, name in enumerate(names):
        trained = [gradient for gradient in gradients if gradient.weighted_norms[index] > 0]
        if name == BASE or not trained:
            continue
        responses = [[respond(gradient, name, factor) for gradient in trained] for factor in FACTORS]
        halves = [factor_of_half(gradient, name) for gradient in trained]
        rows.append(
            (
                name,
                *(f"{median(response.share for response in column):.1%}" for column in responses),
                *(f"{median(response.cosine_to_base for response in column):+.3f}" for column in responses),
                f"{_factor(median(halves))} ({_factor(min(halves))} to {_factor(max(halves))})",
            )
        )
    return rows


def _factor(factor: float) -> str:
    if not math.isfinite(factor):
        return "none"
    return f"x{factor:.3g}" if factor <= _LARGEST_FACTOR else f"above x{_LARGEST_FACTOR:g}"


def _norm_key(name: str) -> str:
    return f"term/{name}/grad_norm_weighted"


def _gradients_at(points: Mapping[str, Mapping[int, float]], names: Sequence[str], step: int) -> Gradients:
    def value(key: str) -> float | None:
        return points.get(key, {}).get(step)

    def sign(name: str) -> float:
        weight = value(f"term/{name}/weight_balanced")
        weight = value(f"term/{name}/weight") if weight is None else weight
        return 1.0 if weight is None else math.copysign(1.0, weight)

    def cosine(a: str, b: str) -> float:
        """Return the cosine of the weighted gradients; the metrics compare gradients without their weights."""
        if a == b:
            return 1.0
        return sign(a) * sign(b) * (value(cosine_key(a, b)) or value(cosine_key(b, a)) or 0.0)

    return Gradients(
        names, [value(_norm_key(name)) or 0.0 for name in names], [[cosine(a, b) for b in names] for a in names]
    )


def _create_artifact(run_name: str, location: str, log: MetricsLog, tables: str) -> None:
    """Show the tables and links to the report on the page of the Prefect run."""
    name, link = escape_markdown(run_name), mlflow_artifact_link(log.client, log.run_id, "report.html")
    create_markdown_artifact(
        key=artifact_key("report", run_name),
        markdown=f"# {name}\n\nThe report is {markdown_code(location)}, and in {link}.\n\n{tables}\n",
        description=f"Terms of {name}",
    )
