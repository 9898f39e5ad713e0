"""Import paths of release 0.1 and the paths that replaced them.

Configs, the ``config.json`` of older runs and users' imports may contain old paths. `current_path` translates them in
data. `install` adds an import hook, so that ``from flows.config_file import load_config`` keeps working in Python.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")

MODULES: Mapping[str, str] = {
    "blocks.holder": "blocks.files.lock_holder",
    "blocks.home": "blocks.files.local",
    "blocks.lease": "blocks.files.lease",
    "blocks.local_directory": "blocks.files.local_directory",
    "blocks.object_directory": "blocks.files.object_directory",
    "blocks.objects": "blocks.files.objects",
    "blocks.processes": "blocks.servers.processes",
    "blocks.reach": "blocks.urls",
    "blocks.supervise": "blocks.servers.supervise",
    "flows.blocks_of": "flows.runs.blocks",
    "flows.budget": "flows.training.budget",
    "flows.checkpoints": "flows.runs.checkpoints.checkpoint_manager",
    "flows.command_line": "flows.runs.cli",
    "flows.config": "flows.config.base",
    "flows.config_file": "flows.config.loader",
    "flows.cookbook_run": "flows.runs.start.cookbook_compat",
    "flows.distill_config": "flows.config.distill",
    "flows.ended": "flows.monitoring.run_tags",
    "flows.estimate": "flows.estimates.supervised",
    "flows.events": "flows.monitoring.events",
    "flows.find_flow": "flows.config.flow_lookup",
    "flows.fork": "flows.runs.start.fork",
    "flows.granularity": "flows.training.granularity",
    "flows.guards": "flows.training.guards",
    "flows.heartbeat": "flows.monitoring.events",
    "flows.learning_rate": "flows.config.learning_rate",
    "flows.live": "flows.monitoring.artifacts",
    "flows.measured": "flows.runs.tracking.mlflow_run",
    "flows.named_checkpoint": "flows.runs.checkpoints.checkpoint_refs",
    "flows.pitfalls": "flows.training.preflight",
    "flows.plan": "flows.training.schedule",
    "flows.prices": "flows.runs.prices",
    "flows.progress": "flows.monitoring.progress",
    "flows.promote_if": "flows.config.promotion",
    "flows.record": "flows.runs.tracking.mlflow_run",
    "flows.recorded": "flows.monitoring.drain",
    "flows.reference": "flows.runs.teachers",
    "flows.refused": "flows.monitoring.run_tags",
    "flows.renderers": "flows.config.loader",
    "flows.result": "flows.runs.result",
    "flows.rlhf_config": "flows.config.rlhf",
    "flows.rollout_config": "flows.config.rollout",
    "flows.run": "flows.runs.run",
    "flows.segments": "flows.runs.retries",
    "flows.shared_service": "flows.sweeps.runner",
    "flows.slot": "flows.runs.blocks",
    "flows.start": "flows.runs.start.resume",
    "flows.stop": "flows.monitoring.interrupts",
    "flows.sweeps.schedule": "flows.sweeps.scheduler",
    "flows.sweeps.trial_cluster": "flows.sweeps.backends.cluster",
    "flows.sweeps.trial_deployment": "flows.sweeps.backends.deployment",
    "flows.sweeps.trial_on_worker": "flows.sweeps.backends.worker",
    "flows.sweeps.trial_process": "flows.sweeps.backends.process",
    "flows.sweeps.trial_watch": "flows.sweeps.backends.watch",
    "flows.sweeps.trials": "flows.sweeps.runner",
    "flows.teachers": "flows.runs.teachers",
    "flows.train_config": "flows.config.train",
    "flows.warn": "flows.monitoring.run_tags",
    "flows.watched": "flows.monitoring.progress",
    "objectives.balance": "objectives.gradients.balance",
    "objectives.collapse": "objectives.gradients.alerts",
    "objectives.describe": "objectives.config.describe",
    "objectives.diagnostics": "objectives.gradients.diagnostics",
    "objectives.execution.event_loop": "objectives.event_loop",
    "objectives.find_term": "objectives.config.term_lookup",
    "objectives.form": "objectives.config.json_schema",
    "objectives.fused": "objectives.one_pass.fused",
    "objectives.kept": "objectives.jsonl_cache",
    "objectives.linearize": "objectives.gradients.linearize",
    "objectives.losses.bradley_terry": "objectives.losses.preference.reference_free",
    "objectives.losses.built_in": "objectives.losses.registry",
    "objectives.losses.cispo": "objectives.losses.policy.importance_weighted",
    "objectives.losses.client_side": "objectives.losses.registry",
    "objectives.losses.conservative_ppo": "objectives.losses.policy.penalized",
    "objectives.losses.dpo": "objectives.losses.preference.reference_based",
    "objectives.losses.dro": "objectives.losses.policy.penalized",
    "objectives.losses.enhanced_ppo": "objectives.losses.policy.enhanced_ppo",
    "objectives.losses.group_relative": "objectives.losses.policy.group_relative",
    "objectives.losses.gspo": "objectives.losses.policy.gspo",
    "objectives.losses.importance_sampling": "objectives.losses.policy.importance_weighted",
    "objectives.losses.kto": "objectives.losses.preference.reference_based",
    "objectives.losses.pairs": "objectives.losses.preference.pairs",
    "objectives.losses.ppo": "objectives.losses.policy.importance_weighted",
    "objectives.losses.ratios": "objectives.losses.policy.ratios",
    "objectives.losses.reference_free": "objectives.losses.preference.reference_free",
    "objectives.losses.stable_reinforce": "objectives.losses.policy.penalized",
    "objectives.named_loss": "objectives.one_pass.named_loss",
    "objectives.one_datum": "objectives.proxies",
    "objectives.one_pass": "objectives.one_pass.planner",
    "objectives.own_copy": "objectives.evaluate",
    "objectives.per_datum": "objectives.term",
    "objectives.pointwise": "objectives.one_pass.pointwise",
    "objectives.regularizer": "objectives.term",
    "objectives.schedule": "objectives.term_weights.schedule",
    "objectives.sdk": "objectives.sdk.custom_loss",
    "objectives.sdk_loop": "objectives.sdk.training_loop",
    "objectives.sensitivity": "objectives.gradients.sensitivity",
    "objectives.spec": "objectives.config.spec",
    "objectives.terms.annotations": "objectives.terms.text.annotations",
    "objectives.terms.confidence": "objectives.terms.token.confidence",
    "objectives.terms.consistency": "objectives.terms.group.consistency",
    "objectives.terms.divergence": "objectives.terms.token.divergence",
    "objectives.terms.entropy": "objectives.terms.token.entropy",
    "objectives.terms.extractors": "objectives.terms.text.extractors",
    "objectives.terms.fairness": "objectives.terms.group.fairness",
    "objectives.terms.kl": "objectives.terms.token.kl",
    "objectives.terms.knowledge": "objectives.terms.text.knowledge",
    "objectives.terms.length": "objectives.terms.text.length",
    "objectives.terms.logic": "objectives.terms.text.logic",
    "objectives.terms.lookups": "objectives.terms.text.lookups",
    "objectives.terms.magnitude": "objectives.terms.token.magnitude",
    "objectives.terms.margin": "objectives.terms.group.margin",
    "objectives.terms.norms": "objectives.terms.token.norms",
    "objectives.terms.orthogonality": "objectives.terms.group.orthogonality",
    "objectives.terms.preferences": "objectives.terms.group.preferences",
    "objectives.terms.repetition": "objectives.terms.text.repetition",
    "objectives.terms.several_targets": "objectives.terms.token.entropy",
    "objectives.terms.simulation": "objectives.terms.text.simulation",
    "objectives.terms.sparsity": "objectives.terms.token.confidence",
    "objectives.terms.topology": "objectives.terms.text.topology",
    "objectives.terms.unlikely": "objectives.terms.token.unlikely",
    "objectives.traced": "objectives.one_pass.traced",
    "objectives.watch": "objectives.gradients.alerts",
    "tasks.advantages": "tasks.rl.advantages",
    "tasks.answer": "tasks.common.service_errors",
    "tasks.checkpoint": "tasks.training.checkpoints",
    "tasks.code_runs": "tasks.sandbox.code_tests",
    "tasks.compare": "tasks.evaluation.policy_comparison",
    "tasks.comparison": "tasks.evaluation.policy_metrics",
    "tasks.comparisons": "tasks.preference.dataset",
    "tasks.constitution": "tasks.supervised.constitution",
    "tasks.data": "tasks.supervised.dataset",
    "tasks.distilled": "tasks.distillation.on_policy",
    "tasks.environments.groups": "tasks.rl.environments.groups",
    "tasks.environments.gsm8k": "tasks.rl.environments.gsm8k",
    "tasks.environments.gym": "tasks.rl.environments.reasoning_gym",
    "tasks.environments.humaneval": "tasks.rl.environments.humaneval",
    "tasks.environments.preferred": "tasks.rl.environments.pairwise",
    "tasks.environments.rewarded": "tasks.rl.environments.reward_model",
    "tasks.evaluate": "tasks.evaluation.evaluators",
    "tasks.features": "tasks.common.datum_cache",
    "tasks.forward": "tasks.training.forward_backward",
    "tasks.given": "tasks.common.builders",
    "tasks.graders": "tasks.common.graders",
    "tasks.judges": "tasks.preference.judges",
    "tasks.keep": "tasks.training.retention",
    "tasks.lessons": "tasks.distillation.teacher_data",
    "tasks.locked": "tasks.common.tokenizers",
    "tasks.metrics": "tasks.training.tracking.metrics",
    "tasks.mixture": "tasks.distillation.mixture",
    "tasks.off_policy": "tasks.rl.async_rollout_source",
    "tasks.options": "tasks.common.task",
    "tasks.page": "tasks.reports.html",
    "tasks.pairs": "tasks.preference.pair_source",
    "tasks.policy": "tasks.rl.rollouts.completer",
    "tasks.preference_models": "tasks.preference.preference_models",
    "tasks.problems": "tasks.rl.group_batches",
    "tasks.promote": "tasks.training.tracking.model_registry",
    "tasks.questions": "tasks.distillation.prompts",
    "tasks.ranking": "tasks.preference.ranking_evaluator",
    "tasks.reference": "tasks.training.reference",
    "tasks.renderer": "tasks.common.renderers",
    "tasks.report": "tasks.reports.run_report",
    "tasks.result_table": "tasks.reports.tables",
    "tasks.rollout": "tasks.rl.rollouts.group_rollout",
    "tasks.rollouts": "tasks.rl.rollout_source",
    "tasks.rows": "tasks.common.jsonl",
    "tasks.sample": "tasks.common.sampling",
    "tasks.sampled.code_tests": "tasks.evaluation.sampled",
    "tasks.sampled.evaluator": "tasks.evaluation.sampled",
    "tasks.sampled.exact_match": "tasks.evaluation.sampled",
    "tasks.sampled.inspect_task": "tasks.evaluation.inspect_tasks",
    "tasks.sampled.summary": "tasks.evaluation.grading_metrics",
    "tasks.sandbox": "tasks.sandbox.runner",
    "tasks.sandbox_child": "tasks.sandbox.child",
    "tasks.self_training": "tasks.supervised.self_training",
    "tasks.service_errors": "tasks.common.service_errors",
    "tasks.source": "tasks.training.batch_source",
    "tasks.sweep_charts": "tasks.sweeps.charts",
    "tasks.sweep_effects": "tasks.sweeps.effects",
    "tasks.sweep_report": "tasks.sweeps.report",
    "tasks.sweep_table": "tasks.sweeps.table",
    "tasks.taught": "tasks.distillation.soft_targets",
    "tasks.teacher": "tasks.training.teacher",
    "tasks.teacher_nll": "tasks.distillation.nll_evaluator",
    "tasks.term_table": "tasks.reports.tables",
    "tasks.terms": "tasks.training.terms",
    "tasks.tokenized": "tasks.common.tokenizers",
    "tasks.traces": "tasks.rl.transcripts.mlflow_traces",
    "tasks.trajectories": "tasks.rl.trajectories",
    "tasks.transcript": "tasks.rl.transcripts.rollout_log",
    "tasks.transcript_page": "tasks.rl.transcripts.rollout_page",
    "tasks.trials": "tasks.sweeps.store",
    "tasks.update": "tasks.training.forward_backward",
    "tasks.weights": "tasks.common.sampling",
    "tasks.written": "tasks.supervised.generated_data",
}
NAMES: Mapping[str, str] = {
    "objectives.terms.logic:Verdict": "objectives.terms.text.logic:CheckCounts",
    "objectives.term:Estimator": "objectives.estimators:EstimatorChoice",
    "blocks.errors:AbsentError": "blocks.errors:UnreachableError",
    "blocks.holder:Holder": "blocks.files.lock_holder:LockHolder",
    "blocks.holder:refusal": "blocks.files.lock_holder:locked_error",
    "blocks.holder:this_process": "blocks.files.lock_holder:current_process",
    "blocks.home:one_at_a_time": "blocks.files.local:file_lock",
    "blocks.processes:log_file": "blocks.servers.processes:new_log_file",
    "blocks.processes:prefect_server": "blocks.servers.processes:prefect_server_command",
    "blocks.processes:running": "blocks.servers.processes:managed_process",
    "blocks.processes:supervised": "blocks.servers.processes:supervised_command",
    "blocks.reach:check_answers": "blocks.urls:check_reachable",
    "blocks.service:from_environment": "blocks.service:is_set_in_environment",
    "flows.blocks_of:service_of": "flows.runs.blocks:open_service",
    "flows.budget:BudgetConfig": "flows.config.train:BudgetConfig",
    "flows.budget:spent_before": "flows.training.budget:cost_before_restart",
    "flows.command_line:exit_with_a_sentence": "flows.runs.cli:exit_on_error",
    "flows.command_line:keep_prefect_off_the_terminal": "flows.runs.cli:silence_console_logs",
    "flows.command_line:show_result": "flows.runs.show:show_result",
    "flows.config:PlaceConfig": "flows.config.base:ServiceConfig",
    "flows.distill:Made": "flows.distill:SourceAndEvaluators",
    "flows.distill_config:LessonsConfig": "flows.config.distill:TeacherDataConfig",
    "flows.distill_config:TaughtConfig": "flows.config.distill:TeacherTargetsConfig",
    "flows.dpo:GIVEN": "flows.dpo:AVAILABLE_INPUTS",
    "flows.dpo:VerdictConfig": "flows.config.dpo:VerdictConfig",
    "flows.ended:TAG": "flows.monitoring.run_tags:STOPPED_TAG",
    "flows.find_flow:Found": "flows.config.flow_lookup:TrainFlow",
    "flows.fork:find_at": "flows.runs.checkpoints.checkpoint_refs:select_checkpoints",
    "flows.fork:forks": "flows.runs.start.fork:is_fork",
    "flows.fork:lack_of": "flows.runs.checkpoints.checkpoint_refs:describe_missing",
    "flows.fork:starts_of_fork": "flows.runs.start.fork:starts_of",
    "flows.granularity:Granularity": "flows.config.train:Granularity",
    "flows.guards:GuardConfig": "flows.config.train:GuardConfig",
    "flows.guards:Policy": "flows.config.train:Policy",
    "flows.heartbeat:EVERY_S": "flows.monitoring.events:HEARTBEAT_EVERY_S",
    "flows.heartbeat:TAG": "flows.monitoring.events:HEARTBEAT_TAG",
    "flows.live:Live": "flows.monitoring.artifacts:RunPage",
    "flows.named_checkpoint:CHECKPOINT": "flows.config.base:CHECKPOINT",
    "flows.named_checkpoint:SERVICE_PATH": "flows.config.base:SERVICE_PATH",
    "flows.named_checkpoint:WHAT": "flows.config.base:CHECKPOINT_HELP",
    "flows.named_checkpoint:WeightsConfig": "flows.config.base:WeightsConfig",
    "flows.plan:Plan": "flows.training.schedule:Schedule",
    "flows.record:changed_fields": "flows.runs.start.config_record:changed_fields",
    "flows.record:check_config": "flows.runs.start.config_record:check_config",
    "flows.refused:EVENT": "flows.monitoring.run_tags:REJECTED_EVENT",
    "flows.refused:TAG": "flows.monitoring.run_tags:REJECTED_TAG",
    "flows.refused:forget_refusal": "flows.monitoring.run_tags:forget_rejection",
    "flows.refused:note_refusal": "flows.monitoring.run_tags:note_rejection",
    "flows.renderers:values_of": "flows.config.loader:field_values",
    "flows.result:Ended": "flows.runs.result:EndReasons",
    "flows.rl:AdvantageConfig": "flows.config.rl:AdvantageConfig",
    "flows.rl:GIVEN": "flows.rl:AVAILABLE_INPUTS",
    "flows.rl:ModeConfig": "flows.config.rl:ModeConfig",
    "flows.segments:in_segments": "flows.runs.retries:run_with_restarts",
    "flows.sft:GIVEN": "flows.sft:AVAILABLE_INPUTS",
    "flows.slot:slot_at": "flows.runs.blocks:service_slot",
    "flows.start:begin": "flows.runs.start.resume:resolve_start",
    "flows.start:first_step": "flows.runs.start.resume:origin_step",
    "flows.stop:LOOK_EVERY_S": "flows.monitoring.interrupts:POLL_EVERY_S",
    "flows.stop:Stop": "flows.monitoring.interrupts:StopRequest",
    "flows.stop:listening_for_stop": "flows.monitoring.interrupts:deferred_interrupts",
    "flows.sweeps.ablation:Weighted": "flows.sweeps.ablation:WeightedRegularizer",
    "flows.sweeps.ablation:weighted_of": "flows.sweeps.ablation:weighted_regularizers",
    "flows.sweeps.ablation:without_idle": "flows.sweeps.ablation:drop_idle_values",
    "flows.sweeps.pruning:Pruning": "flows.sweeps.pruning:Pruner",
    "flows.sweeps.result:conclude": "flows.sweeps.result:finish_sweep",
    "flows.sweeps.search:Tried": "flows.sweeps.search:TriedPoint",
    "flows.sweeps.trial_process:End": "flows.sweeps.protocols:TrialOutcome",
    "flows.sweeps.trial_process:end_of": "flows.sweeps.backends.process:run_to_outcome",
    "flows.sweeps.trial_watch:LOOK_EVERY_S": "flows.sweeps.backends.watch:POLL_EVERY_S",
    "flows.sweeps.trial_watch:PASSING": "flows.sweeps.backends.watch:TRANSIENT_ERRORS",
    "flows.sweeps.trial_watch:Watched": "flows.sweeps.backends.watch:TrialMonitor",
    "flows.sweeps.trials:Runner": "flows.sweeps.protocols:Runner",
    "flows.sweeps.trials:Sweeping": "flows.sweeps.runner:TrialExecutor",
    "flows.teachers:TeacherConfig": "flows.config.distill:TeacherConfig",
    "flows.warn:TAG": "flows.monitoring.run_tags:WARNING_TAG",
    "flows.warn:warn": "flows.monitoring.run_tags:warn_of_terms",
    "flows.watched:Watcher": "flows.monitoring.progress:StepCallback",
    "flows.watched:show_metrics": "flows.monitoring.progress:call_step_callback",
    "flows.watched:watched_by": "flows.monitoring.progress:step_callback",
    "objectives.collapse:FIGURES": "objectives.gradients.alerts:PREFERENCE_METRICS",
    "objectives.collapse:Collapse": "objectives.gradients.alerts:CollapseCheck",
    "objectives.collapse:collapses": "objectives.gradients.alerts:check_collapses",
    "objectives.diagnostics:ROW_METRICS": "objectives.gradients.diagnostics:RESERVED_TERM_METRICS",
    "objectives.execution.respond:FUNCTIONS": "objectives.execution.runner:FUNCTIONS",
    "objectives.form:limits_beside_unions": "objectives.config.json_schema:move_limits_out_of_unions",
    "objectives.kept:CorruptKeptError": "objectives.jsonl_cache:CorruptCacheError",
    "objectives.kept:Kept": "objectives.jsonl_cache:JsonlCache",
    "objectives.labels:better_first": "objectives.labels:find_preference_pairs",
    "objectives.labels:label_of": "objectives.labels:get_label",
    "objectives.labels:pairs_of": "objectives.labels:find_pairs",
    "objectives.losses.conservative_ppo:conservative_metrics": (
        "objectives.losses.policy.penalized:conservative_ppo_metrics"
    ),
    "objectives.named_loss:named_loss": "objectives.one_pass.named_loss:find_named_loss",
    "objectives.one_pass:ServiceClient": "objectives.sdk.protocols:ServiceClient",
    "objectives.one_pass:Uploaded": "objectives.one_pass.planner:UploadedLoss",
    "objectives.reductions:refuse_several_targets": "objectives.reductions:check_single_target",
    "objectives.sdk_loop:TrainingClient": "objectives.sdk.protocols:TrainingClient",
    "objectives.terms:sparsity": "objectives.terms.token:confidence",
    "objectives.terms.annotations:value_of": "objectives.terms.text.annotations:evaluate_program",
    "objectives.find_term:ALLOWED_MODULES": "objectives.config.import_policy:ALLOWED_MODULES",
    "objectives.find_term:allowed_modules": "objectives.config.import_policy:named_modules",
    "objectives.terms.extractors:read_solutions": "objectives.terms.text.extractors:extract",
    "objectives.terms.extractors:texts_of": "objectives.terms.text.extractors:get_texts",
    "objectives.terms.knowledge:Checked": "objectives.terms.text.knowledge:FactCounts",
    "objectives.terms.several_targets:with_rest": "objectives.terms.token.entropy:append_rest",
    "objectives.terms.topology:shape_of": "objectives.terms.text.topology:compute_shape",
    "objectives.traced:Case": "objectives.one_pass.traced:InputSignature",
    "objectives.traced:function_of": "objectives.one_pass.traced:with_named_parameters",
    "objectives.traced:stand_ins": "objectives.one_pass.traced:make_datum_proxies",
    "objectives.watch:Warned": "objectives.gradients.alerts:TermWarning",
    "tasks.advantages:Shape": "tasks.rl.advantages:AdvantageSettings",
    "tasks.answer:wait_for_answer": "tasks.common.service_errors:wait_for_response",
    "tasks.code_runs:run_tests_apart": "tasks.sandbox.code_tests:run_tests_async",
    "tasks.compare:Compared": "tasks.evaluation.policy_comparison:PolicyComparison",
    "tasks.data:DataSource": "tasks.supervised.dataset:SupervisedSource",
    "tasks.data:Datums": "tasks.training.datums:Datums",
    "tasks.data:NOTHING": "tasks.common.builders:NO_RESOURCES",
    "tasks.data:build": "tasks.common.builders:build",
    "tasks.data:import_object": "tasks.common.builders:import_object",
    "tasks.data:pack_datums": "tasks.training.datums:pack_datums",
    "tasks.distilled:DistilledSource": "tasks.distillation.on_policy:OnPolicySource",
    "tasks.distilled:TeacherDistance": "tasks.distillation.on_policy:TeacherKL",
    "tasks.distilled:as_teacher_sees": "tasks.distillation.on_policy:datum_for_teacher",
    "tasks.environments.gym:create": "tasks.rl.environments.reasoning_gym:create_gym_dataset",
    "tasks.environments.preferred:AgainstTheBetter": "tasks.rl.environments.pairwise:ChosenAnswerGroupBuilder",
    "tasks.environments.preferred:PreferredBuilder": "tasks.rl.environments.pairwise:TournamentBuilder",
    "tasks.environments.rewarded:RewardedBuilder": "tasks.rl.environments.reward_model:RewardModelBuilder",
    "tasks.environments.rewarded:RewardedGroup": "tasks.rl.environments.reward_model:RewardModelGroupBuilder",
    "tasks.features:load_kept": "tasks.common.datum_cache:load_cache",
    "tasks.features:save_kept": "tasks.common.datum_cache:save_cache",
    "tasks.given:given": "tasks.common.builders:default_params",
    "tasks.graders:run_tests": "tasks.sandbox.code_tests:run_tests",
    "tasks.judges:ask_completer": "tasks.preference.judges:completer_judge",
    "tasks.lessons:Lesson": "tasks.distillation.teacher_data:TeacherInput",
    "tasks.lessons:Lessons": "tasks.distillation.teacher_data:SequenceSettings",
    "tasks.lessons:TaughtSource": "tasks.distillation.teacher_data:TeacherDataSource",
    "tasks.lessons:pack_lessons": "tasks.distillation.teacher_data:pack_teacher_data",
    "tasks.mixture:Batched": "tasks.distillation.mixture:BatchedDataset",
    "tasks.off_policy:OffPolicySource": "tasks.rl.async_rollout_source:AsyncRolloutSource",
    "tasks.off_policy:Played": "tasks.rl.async_rollout_source:CompletedGroup",
    "tasks.options:folded": "tasks.common.task:inline_tasks",
    "tasks.options:whole": "tasks.common.task:opaque_argument",
    "tasks.page:drawn": "tasks.reports.html:render_figure",
    "tasks.page:markdown": "tasks.reports.html:markdown_table",
    "tasks.page:seen_in_mlflow": "tasks.reports.html:mlflow_artifact_link",
    "tasks.page:svg": "tasks.reports.html:inline_svg",
    "tasks.pairs:Pairs": "tasks.preference.pair_source:PairBatches",
    "tasks.policy:Policy": "tasks.rl.rollouts.completer:SnapshotCompleter",
    "tasks.preference_models:AskedBuilder": "tasks.preference.preference_models:PromptedJudgeBuilder",
    "tasks.problems:Problems": "tasks.rl.group_batches:GroupBatches",
    "tasks.promote:Promoted": "tasks.training.tracking.model_registry:Promotion",
    "tasks.questions:QUESTION": "tasks.common.jsonl:QUESTION",
    "tasks.questions:QuestionEnv": "tasks.distillation.prompts:PromptEnv",
    "tasks.questions:QuestionGroup": "tasks.distillation.prompts:PromptGroup",
    "tasks.questions:Questions": "tasks.distillation.prompts:Prompts",
    "tasks.questions:fill": "tasks.common.jsonl:fill",
    "tasks.ranking:Ranking": "tasks.preference.ranking_evaluator:RankingEvaluator",
    "tasks.rollout:Patient": "tasks.rl.rollouts.group_rollout:RetryWholeGroup",
    "tasks.rollout:run_coroutine": "tasks.common.event_loop:run_coroutine",
    "tasks.rollouts:Cut": "tasks.rl.rollout_source:MinibatchSettings",
    "tasks.rollouts:Play": "tasks.rl.rollout_source:RolloutSettings",
    "tasks.renderer:find_renderer": "tasks.common.renderers:find_renderer_name",
    "tasks.renderer:renderer_of": "tasks.common.renderers:renderer_name_of",
    "tasks.self_training:agreed": "tasks.supervised.self_training:majority_answers",
    "tasks.source:Sampled": "tasks.training.batch_source:SampledTokens",
    "tasks.source:Source": "tasks.training.batch_source:BatchSource",
    "tasks.source:Trained": "tasks.training.batch_source:TrainedBatch",
    "tasks.sweep_effects:effects": "tasks.sweeps.effects:estimate_effects",
    "tasks.sweep_effects:fit": "tasks.sweeps.effects:fit_least_squares",
    "tasks.sweep_effects:shown_metrics": "tasks.sweeps.effects:reported_metrics",
    "tasks.sweep_report:effect_cells": "tasks.sweeps.report:effect_table",
    "tasks.sweep_table:columns_of": "tasks.sweeps.table:table_columns",
    "tasks.sweep_table:short": "tasks.sweeps.table:short_name",
    "tasks.taught:Taught": "tasks.distillation.soft_targets:TeacherSequence",
    "tasks.taught:pack_taught": "tasks.distillation.soft_targets:pack_sequences",
    "tasks.teacher:Asked": "tasks.training.teacher:TeacherRequest",
    "tasks.teacher:behind": "tasks.training.teacher:replace_prompt",
    "tasks.teacher:soften": "tasks.training.teacher:compute_top_k",
    "tasks.teacher:trained_of": "tasks.training.teacher:trained_positions",
    "tasks.term_table:cells": "tasks.reports.tables:format_row",
    "tasks.terms:linearize_terms": "objectives.execution.term_loop:linearize_terms",
    "tasks.trajectories:penalize_distance": "tasks.rl.trajectories:apply_kl_penalty",
    "tasks.transcript:figures_text": "tasks.rl.transcripts.rollout_log:metrics_text",
    "tasks.weights:open_trainer": "tasks.common.sampling:open_training_client",
    "tasks.written:Author": "tasks.supervised.generated_data:AnswerSampler",
    "tasks.written:Notebook": "tasks.supervised.generated_data:CachedSampler",
    "tasks.written:WrittenBuilder": "tasks.supervised.generated_data:GeneratedDataBuilder",
    "tasks.written:write": "tasks.supervised.generated_data:generate",
}
# Renamed parameters of builders.
PARAMETERS: Mapping[str, Mapping[str, str]] = {
    "tasks.distillation.prompts:QuestionsBuilder": {"asked": "student_prompt", "shown": "teacher_prompt"},
    "tasks.supervised.constitution:RevisedBuilder": {"asked": "prompt"},
    "tasks.supervised.self_training:SelfTrainingBuilder": {"asked": "prompt"},
    "tinker_flows:QuestionsBuilder": {"asked": "student_prompt", "shown": "teacher_prompt"},
    "tinker_flows:RevisedBuilder": {"asked": "prompt"},
    "tinker_flows:SelfTrainingBuilder": {"asked": "prompt"},
}
# Packages of release 0.1 that are gone; only their modules have successors.
_PACKAGES = frozenset(["tasks.environments", "tasks.sampled"])


def current_path(path: str) -> str:
    """Return an import path of any release as ``package.module:name`` of this one.

    >>> current_path("tasks.graders.same_number")
    'tasks.common.graders:same_number'
    """
    module, separator, name = path.partition(":")
    if not separator:
        module, _, name = path.rpartition(".")
    return NAMES.get(f"{module}:{name}", f"{MODULES.get(module, module)}:{name}")


def with_current_paths(value: T) -> T:
    """Return plain data in which old import paths and old parameters of builders are replaced, at any depth."""
    return _replaced(value)


def renamed_attribute(module: str, name: str) -> Any:
    """Return the object that ``module.name`` meant in release 0.1, for the `__getattr__` of a package.

    Raises:
        AttributeError: the module never had this name.
    """
    path = NAMES.get(f"{module}:{name}")
    if path is None and module in MODULES and not name.startswith("__"):
        path = f"{MODULES[module]}:{name}"
    if path is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    new_module, _, new_name = path.partition(":")
    return getattr(importlib.import_module(new_module), new_name)


def install() -> None:
    """Make imports of renamed modules work in this process, with a `DeprecationWarning`."""
    if not any(isinstance(finder, _RenamedModules) for finder in sys.meta_path):
        sys.meta_path.append(_RenamedModules())


class _RenamedModules(MetaPathFinder, Loader):
    """Finder of renamed modules; comes last, so that a module that exists is always preferred."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES and fullname not in _PACKAGES:
            return None
        return ModuleSpec(fullname, self, is_package=fullname in _PACKAGES)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return RenamedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if new := MODULES.get(module.__name__):
            warnings.warn(f"{module.__name__} is now {new}.", DeprecationWarning, stacklevel=2)


class RenamedModule(ModuleType):
    """Stand-in for a renamed module that looks its names up where they are now."""

    def __getattr__(self, name: str) -> object:
        return renamed_attribute(self.__name__, name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        # Importing the old module `objectives.linearize` hides the function of that name, so calls go to the function.
        return renamed_attribute(self.__name__, self.__name__.rpartition(".")[2])(*args, **kwargs)


def _replaced(value: Any) -> Any:
    if isinstance(value, str):
        return current_path(value) if _is_old(value) else value
    if isinstance(value, Mapping):
        replaced = {key: _replaced(item) for key, item in value.items()}
        names = PARAMETERS.get(str(replaced.get("builder")))
        params = replaced.get("params")
        if names is None or not isinstance(params, Mapping):
            return replaced
        return replaced | {"params": {names.get(name, name): param for name, param in params.items()}}
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item) for item in value)
    return value


def _is_old(path: str) -> bool:
    module, separator, name = path.partition(":")
    if not separator:
        module, _, name = path.rpartition(".")
    return module in MODULES or f"{module}:{name}" in NAMES
