"""Public namespace: every name that your scripts, notebooks and configs need.

It has flows and their configs, objectives and regularizers, builders, environments, evaluators, and the errors to
catch:

    from tinker_flows import SftConfig, load_config, regularizer, run, sft

Each name is imported on first use (PEP 562), so `import tinker_flows` loads neither torch nor Prefect. The loss
functions are in `tinker_flows.losses`.

An error of this package that a script does not catch ends it with one sentence. The traceback is in a file of the
project home, or on the terminal with `TINKER_FLOWS_TRACEBACK=1`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import blocks  # noqa: F401  # before MLflow, whose telemetry it disables
from tinker_flows.script_errors import install as install_error_hook

if TYPE_CHECKING:
    from blocks import MLflowTracking, RunStorage, TinkerService
    from blocks.errors import (
        ConfigError,
        EvaluatorError,
        GuardError,
        ServiceError,
        ServiceLostError,
        StorageError,
        TinkerFlowsError,
        UnreachableError,
    )
    from flows.compare import CompareConfig, CompareResult, compare, show_comparison
    from flows.config.base import AdamConfig, BuilderConfig, EngineConfig, EvaluatorConfig, KeepBestConfig
    from flows.config.distill import (
        GroupsConfig,
        HindsightConfig,
        OffPolicyConfig,
        OnPolicyConfig,
        PromptConfig,
        QuestionsConfig,
        SelfConfig,
        TeacherConfig,
        TeacherDataConfig,
    )
    from flows.config.dpo import DpoConfig, VerdictConfig
    from flows.config.loader import load_config
    from flows.config.rl import (
        AdvantageConfig,
        CorrectionConfig,
        CriticConfig,
        HealthConfig,
        ModeConfig,
        NamedRewardConfig,
        RlConfig,
    )
    from flows.config.rlhf import PolicyConfig, RewardConfig, RlhfConfig
    from flows.config.rollout import OverlongConfig, RolloutConfig, TerminationConfig
    from flows.config.train import (
        AlertConfig,
        BudgetConfig,
        CandidatesConfig,
        GuardConfig,
        ReportConfig,
        SftConfig,
        TaskRunnerConfig,
        TrainConfig,
    )
    from flows.distill import off_policy_distillation, on_policy_distillation, prompt_distillation, self_distillation
    from flows.dpo import dpo
    from flows.estimates.supervised import Estimate, estimate
    from flows.evaluate import EvaluateConfig, EvaluateResult, evaluate, show_evaluation
    from flows.export import ExportConfig, ExportResult, export, show_export
    from flows.rl import rl
    from flows.rlhf import rlhf
    from flows.runs.cli import exit_on_error, run
    from flows.runs.result import TrainResult
    from flows.runs.show import show_result
    from flows.sft import sft
    from flows.sweep import show_sweep, sweep
    from flows.sweeps.config import PruneConfig, Range, SearchConfig, SweepConfig
    from flows.sweeps.result import SweepResult
    from objectives import (
        BaseLossSpec,
        Batch,
        Evaluation,
        Linearized,
        Objective,
        ObjectiveError,
        ObjectiveSpec,
        OnePass,
        Outputs,
        RegularizedOutput,
        Regularizer,
        RegularizerSpec,
        Term,
        evaluate_base,
        evaluate_term,
        forward_backward_regularized,
        forward_backward_regularized_async,
        linearize,
        pack,
        prepare_features,
        regularizer,
        unpack,
    )
    from objectives.advantages import centre_by_group, compute_gae, discounted_returns, leave_one_out
    from objectives.config.spec import AlignedMTLSpec, CAGradSpec, GradNormSpec, WatchSpec, WeightingSpec
    from objectives.config.term_lookup import find_term, registered_terms
    from objectives.gradients.alerts import TermWarning
    from objectives.labels import Pairs, find_pairs, find_preference_pairs, get_label, get_text_label, with_labels
    from objectives.reductions import mean_by_datum, sum_by_datum, trained_datums
    from objectives.sdk.training_loop import pack_data
    from objectives.term import Flag, per_datum
    from objectives.term_weights.schedule import Constant, Cosine, Linear, Warmup
    from objectives.term_weights.targets import TargetSpec
    from objectives.terms.text.annotations import Solution, read_solution
    from objectives.terms.text.extractors import extractor
    from objectives.terms.text.topology import Graph
    from tasks.common.graders import find_code, pass_at, same_number, same_text
    from tasks.common.sampling import Sampling
    from tasks.common.tokenizers import TokenizedEvaluator
    from tasks.distillation.prompts import QuestionsBuilder
    from tasks.evaluation.benchmarks import Benchmark
    from tasks.evaluation.inspect_tasks import InspectTask
    from tasks.evaluation.sampled import CodeTests, ExactMatch, SampledEvaluator
    from tasks.preference.judges import by_answer
    from tasks.preference.preference_models import JudgeBuilder, PairwiseBuilder, PromptedJudgeBuilder
    from tasks.rl.critic import turn_features
    from tasks.rl.environments.groups import Group, Groups, GroupsBuilder
    from tasks.rl.environments.gsm8k import Gsm8kBuilder
    from tasks.rl.environments.humaneval import HumanEvalBuilder
    from tasks.rl.environments.pairwise import TournamentBuilder
    from tasks.rl.environments.reasoning_gym import GymBuilder
    from tasks.rl.environments.reward_model import RewardModelBuilder
    from tasks.rl.rollouts.hooks import HookAction
    from tasks.sandbox.runner import Limits, Outcome, run_program
    from tasks.supervised.constitution import RevisedBuilder
    from tasks.supervised.generated_data import GeneratedDataBuilder
    from tasks.supervised.label_distributions import LabelDistributionBuilder
    from tasks.supervised.labelled_data import LabelledBuilder
    from tasks.supervised.self_training import SelfTrainingBuilder

__version__ = "0.2.0"

__all__ = [
    "AdamConfig",
    "AdvantageConfig",
    "AlertConfig",
    "AlignedMTLSpec",
    "BaseLossSpec",
    "Batch",
    "Benchmark",
    "BudgetConfig",
    "BuilderConfig",
    "CAGradSpec",
    "CandidatesConfig",
    "CodeTests",
    "CompareConfig",
    "CompareResult",
    "ConfigError",
    "Constant",
    "CorrectionConfig",
    "Cosine",
    "CriticConfig",
    "DpoConfig",
    "EngineConfig",
    "Estimate",
    "EvaluateConfig",
    "EvaluateResult",
    "Evaluation",
    "EvaluatorConfig",
    "EvaluatorError",
    "ExactMatch",
    "ExportConfig",
    "ExportResult",
    "Flag",
    "GeneratedDataBuilder",
    "GradNormSpec",
    "Graph",
    "Group",
    "Groups",
    "GroupsBuilder",
    "GroupsConfig",
    "Gsm8kBuilder",
    "GuardConfig",
    "GuardError",
    "GymBuilder",
    "HealthConfig",
    "HindsightConfig",
    "HookAction",
    "HumanEvalBuilder",
    "InspectTask",
    "JudgeBuilder",
    "KeepBestConfig",
    "LabelDistributionBuilder",
    "LabelledBuilder",
    "Limits",
    "Linear",
    "Linearized",
    "MLflowTracking",
    "ModeConfig",
    "NamedRewardConfig",
    "Objective",
    "ObjectiveError",
    "ObjectiveSpec",
    "OffPolicyConfig",
    "OnPolicyConfig",
    "OnePass",
    "Outcome",
    "Outputs",
    "OverlongConfig",
    "Pairs",
    "PairwiseBuilder",
    "PolicyConfig",
    "PromptConfig",
    "PromptedJudgeBuilder",
    "PruneConfig",
    "QuestionsBuilder",
    "QuestionsConfig",
    "Range",
    "RegularizedOutput",
    "Regularizer",
    "RegularizerSpec",
    "ReportConfig",
    "RevisedBuilder",
    "RewardConfig",
    "RewardModelBuilder",
    "RlConfig",
    "RlhfConfig",
    "RolloutConfig",
    "RunStorage",
    "SampledEvaluator",
    "Sampling",
    "SearchConfig",
    "SelfConfig",
    "SelfTrainingBuilder",
    "ServiceError",
    "ServiceLostError",
    "SftConfig",
    "Solution",
    "StorageError",
    "SweepConfig",
    "SweepResult",
    "TargetSpec",
    "TaskRunnerConfig",
    "TeacherConfig",
    "TeacherDataConfig",
    "Term",
    "TermWarning",
    "TerminationConfig",
    "TinkerFlowsError",
    "TinkerService",
    "TokenizedEvaluator",
    "TournamentBuilder",
    "TrainConfig",
    "TrainResult",
    "UnreachableError",
    "VerdictConfig",
    "Warmup",
    "WatchSpec",
    "WeightingSpec",
    "by_answer",
    "centre_by_group",
    "compare",
    "compute_gae",
    "discounted_returns",
    "dpo",
    "estimate",
    "evaluate",
    "evaluate_base",
    "evaluate_term",
    "exit_on_error",
    "export",
    "extractor",
    "find_code",
    "find_pairs",
    "find_preference_pairs",
    "find_term",
    "forward_backward_regularized",
    "forward_backward_regularized_async",
    "get_label",
    "get_text_label",
    "leave_one_out",
    "linearize",
    "load_config",
    "mean_by_datum",
    "off_policy_distillation",
    "on_policy_distillation",
    "pack",
    "pack_data",
    "pass_at",
    "per_datum",
    "prepare_features",
    "prompt_distillation",
    "read_solution",
    "registered_terms",
    "regularizer",
    "rl",
    "rlhf",
    "run",
    "run_program",
    "same_number",
    "same_text",
    "self_distillation",
    "sft",
    "show_comparison",
    "show_evaluation",
    "show_export",
    "show_result",
    "show_sweep",
    "sum_by_datum",
    "sweep",
    "trained_datums",
    "turn_features",
    "unpack",
    "with_labels",
]

# The module of each public name.
_MODULES = {
    "MLflowTracking": "blocks",
    "RunStorage": "blocks",
    "TinkerService": "blocks",
    "ConfigError": "blocks.errors",
    "EvaluatorError": "blocks.errors",
    "GuardError": "blocks.errors",
    "ServiceError": "blocks.errors",
    "ServiceLostError": "blocks.errors",
    "StorageError": "blocks.errors",
    "TinkerFlowsError": "blocks.errors",
    "UnreachableError": "blocks.errors",
    "CompareConfig": "flows.compare",
    "CompareResult": "flows.compare",
    "compare": "flows.compare",
    "show_comparison": "flows.compare",
    "AdamConfig": "flows.config.base",
    "BuilderConfig": "flows.config.base",
    "EvaluatorConfig": "flows.config.base",
    "EngineConfig": "flows.config.base",
    "KeepBestConfig": "flows.config.base",
    "BudgetConfig": "flows.config.train",
    "GroupsConfig": "flows.config.distill",
    "HindsightConfig": "flows.config.distill",
    "TeacherDataConfig": "flows.config.distill",
    "OffPolicyConfig": "flows.config.distill",
    "OnPolicyConfig": "flows.config.distill",
    "PromptConfig": "flows.config.distill",
    "QuestionsConfig": "flows.config.distill",
    "SelfConfig": "flows.config.distill",
    "TeacherConfig": "flows.config.distill",
    "DpoConfig": "flows.config.dpo",
    "VerdictConfig": "flows.config.dpo",
    "AlertConfig": "flows.config.train",
    "CandidatesConfig": "flows.config.train",
    "TaskRunnerConfig": "flows.config.train",
    "GuardConfig": "flows.config.train",
    "ReportConfig": "flows.config.train",
    "load_config": "flows.config.loader",
    "AdvantageConfig": "flows.config.rl",
    "CorrectionConfig": "flows.config.rl",
    "CriticConfig": "flows.config.rl",
    "HealthConfig": "flows.config.rl",
    "ModeConfig": "flows.config.rl",
    "NamedRewardConfig": "flows.config.rl",
    "RlConfig": "flows.config.rl",
    "PolicyConfig": "flows.config.rlhf",
    "RewardConfig": "flows.config.rlhf",
    "RlhfConfig": "flows.config.rlhf",
    "OverlongConfig": "flows.config.rollout",
    "RolloutConfig": "flows.config.rollout",
    "TerminationConfig": "flows.config.rollout",
    "SftConfig": "flows.config.train",
    "TrainConfig": "flows.config.train",
    "off_policy_distillation": "flows.distill",
    "on_policy_distillation": "flows.distill",
    "prompt_distillation": "flows.distill",
    "self_distillation": "flows.distill",
    "dpo": "flows.dpo",
    "Estimate": "flows.estimates.supervised",
    "estimate": "flows.estimates.supervised",
    "EvaluateConfig": "flows.evaluate",
    "EvaluateResult": "flows.evaluate",
    "evaluate": "flows.evaluate",
    "show_evaluation": "flows.evaluate",
    "ExportConfig": "flows.export",
    "ExportResult": "flows.export",
    "export": "flows.export",
    "show_export": "flows.export",
    "rl": "flows.rl",
    "rlhf": "flows.rlhf",
    "exit_on_error": "flows.runs.cli",
    "run": "flows.runs.cli",
    "show_result": "flows.runs.show",
    "TrainResult": "flows.runs.result",
    "sft": "flows.sft",
    "show_sweep": "flows.sweep",
    "sweep": "flows.sweep",
    "PruneConfig": "flows.sweeps.config",
    "Range": "flows.sweeps.config",
    "SearchConfig": "flows.sweeps.config",
    "SweepConfig": "flows.sweeps.config",
    "SweepResult": "flows.sweeps.result",
    "BaseLossSpec": "objectives",
    "Batch": "objectives",
    "Evaluation": "objectives",
    "Linearized": "objectives",
    "Objective": "objectives",
    "ObjectiveError": "objectives",
    "ObjectiveSpec": "objectives",
    "OnePass": "objectives",
    "Outputs": "objectives",
    "RegularizedOutput": "objectives",
    "Regularizer": "objectives",
    "RegularizerSpec": "objectives",
    "Term": "objectives",
    "Flag": "objectives.term",
    "evaluate_base": "objectives",
    "evaluate_term": "objectives",
    "forward_backward_regularized": "objectives",
    "forward_backward_regularized_async": "objectives",
    "linearize": "objectives",
    "pack": "objectives",
    "prepare_features": "objectives",
    "regularizer": "objectives",
    "unpack": "objectives",
    "centre_by_group": "objectives.advantages",
    "compute_gae": "objectives.advantages",
    "discounted_returns": "objectives.advantages",
    "leave_one_out": "objectives.advantages",
    "TermWarning": "objectives.gradients.alerts",
    "Pairs": "objectives.labels",
    "find_preference_pairs": "objectives.labels",
    "get_label": "objectives.labels",
    "get_text_label": "objectives.labels",
    "with_labels": "objectives.labels",
    "LabelDistributionBuilder": "tasks.supervised.label_distributions",
    "LabelledBuilder": "tasks.supervised.labelled_data",
    "find_pairs": "objectives.labels",
    "mean_by_datum": "objectives.reductions",
    "sum_by_datum": "objectives.reductions",
    "trained_datums": "objectives.reductions",
    "Constant": "objectives.term_weights.schedule",
    "Cosine": "objectives.term_weights.schedule",
    "Linear": "objectives.term_weights.schedule",
    "Warmup": "objectives.term_weights.schedule",
    "pack_data": "objectives.sdk.training_loop",
    "AlignedMTLSpec": "objectives.config.spec",
    "CAGradSpec": "objectives.config.spec",
    "GradNormSpec": "objectives.config.spec",
    "WatchSpec": "objectives.config.spec",
    "WeightingSpec": "objectives.config.spec",
    "TargetSpec": "objectives.term_weights.targets",
    "per_datum": "objectives.term",
    "find_term": "objectives.config.term_lookup",
    "registered_terms": "objectives.config.term_lookup",
    "Solution": "objectives.terms.text.annotations",
    "read_solution": "objectives.terms.text.annotations",
    "extractor": "objectives.terms.text.extractors",
    "Graph": "objectives.terms.text.topology",
    "find_code": "tasks.common.graders",
    "pass_at": "tasks.common.graders",
    "same_number": "tasks.common.graders",
    "same_text": "tasks.common.graders",
    "Sampling": "tasks.common.sampling",
    "TokenizedEvaluator": "tasks.common.tokenizers",
    "QuestionsBuilder": "tasks.distillation.prompts",
    "SampledEvaluator": "tasks.evaluation.sampled",
    "CodeTests": "tasks.evaluation.sampled",
    "ExactMatch": "tasks.evaluation.sampled",
    "InspectTask": "tasks.evaluation.inspect_tasks",
    "Benchmark": "tasks.evaluation.benchmarks",
    "by_answer": "tasks.preference.judges",
    "PromptedJudgeBuilder": "tasks.preference.preference_models",
    "JudgeBuilder": "tasks.preference.preference_models",
    "PairwiseBuilder": "tasks.preference.preference_models",
    "HookAction": "tasks.rl.rollouts.hooks",
    "turn_features": "tasks.rl.critic",
    "Group": "tasks.rl.environments.groups",
    "Groups": "tasks.rl.environments.groups",
    "GroupsBuilder": "tasks.rl.environments.groups",
    "Gsm8kBuilder": "tasks.rl.environments.gsm8k",
    "HumanEvalBuilder": "tasks.rl.environments.humaneval",
    "TournamentBuilder": "tasks.rl.environments.pairwise",
    "GymBuilder": "tasks.rl.environments.reasoning_gym",
    "RewardModelBuilder": "tasks.rl.environments.reward_model",
    "Limits": "tasks.sandbox.runner",
    "Outcome": "tasks.sandbox.runner",
    "run_program": "tasks.sandbox.runner",
    "RevisedBuilder": "tasks.supervised.constitution",
    "GeneratedDataBuilder": "tasks.supervised.generated_data",
    "SelfTrainingBuilder": "tasks.supervised.self_training",
}


install_error_hook()


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__", "losses"]
