"""Distillation flows on the tiny model."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from distill_config import distill_fields, environment, make_teacher, questions
from metric_history import curve
from mlflow import MlflowClient
from rl_config import rl_fields

from blocks import RunStorage
from blocks.errors import ConfigError
from deployments.methods import config_type_of, flow_of
from flows import distill
from flows.config.distill import OffPolicyConfig, OnPolicyConfig, PromptConfig, SelfConfig
from flows.config.rollout import RolloutConfig
from flows.distill import (
    check_targets,
    off_policy_distillation,
    on_policy_distillation,
    prompt_distillation,
    self_distillation,
    stored_under,
)
from flows.runs.result import TrainResult
from flows.runs.teachers import TEACHERS
from objectives.objective import Objective
from tasks.distillation.teacher_data import TAUGHT_NAME
from tasks.rl.health import HealthLimits
from tasks.training.held_out import read_batch_values

ROOT = Path(__file__).parents[2]
RECIPES = ("on_policy_distillation", "off_policy_distillation", "prompt_distillation", "self_distillation")
PROMPT = "Say nothing but the letters a and b, eight of them, as in abababab."

pytestmark = pytest.mark.usefixtures("prefect_server", "api_key")


def test_each_dataset_has_its_teacher(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    plain = {"environment": environment(tmp_path)}
    hinted = {"environment": environment(tmp_path, teacher_prompt=PROMPT), "weight": 3.0}
    fields = distill_fields(tmp_path, "two-teachers", mlflow_uri, engine_url) | {"datasets": [plain, hinted]}
    result = on_policy_distillation(OnPolicyConfig.model_validate(fields))
    # The base weights are the teacher: initially, student and teacher differ only in their prompts.
    assert curve(result, "teacher_kl/dataset_0")[0] == pytest.approx(0.0, abs=1e-4)
    assert curve(result, "teacher_kl/dataset_1")[0] > 0.1
    assert curve(result, "env/all/total_episodes") == [4.0, 4.0]
    measured = curve(result, "test/teacher_kl")
    assert len(measured) == 2
    stored = read_batch_values(RunStorage(url=fields["storage"]).run_directory("two-teachers"))
    before, after = (stored[step]["test/teacher_kl"] for step in sorted(stored))
    assert len(before.values_B) == 32  # prompts of both datasets
    assert [scores.mean()[0] for scores in (before, after)] == pytest.approx(measured, rel=1e-5)
    assert after.is_paired_with(before)


def test_rewards_are_trained_on_together_with_the_teacher(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    """Initially student and teacher are equal, so that all advantages come from the rewards."""
    letters = rl_fields(tmp_path, "", "")["environment"]
    fields = distill_fields(tmp_path, "", mlflow_uri, engine_url) | {"datasets": [{"environment": letters}]}
    fields |= {"num_steps": 1, "eval_every": 0, "compute_post_kl": True, "kl_penalty_coef": 0.5}

    def run(name: str, **changes: Any) -> TrainResult:
        return on_policy_distillation(OnPolicyConfig.model_validate(fields | {"run_name": name, **changes}))

    without, rewarded = run("teacher-only"), run("rewarded", train_on_rewards=True)
    rewards = curve(rewarded, "env/all/reward/total")
    assert curve(without, "env/all/reward/total") == rewards
    assert curve(without, "advantage/std")[0] < 1e-4 < curve(rewarded, "advantage/std")[0]
    for result in (without, rewarded):
        assert curve(result, "teacher_kl")[0] == pytest.approx(0, abs=1e-4)
    assert curve(rewarded, "kl_pre_post_v2")[0] > 0


def test_soft_targets_lead_to_the_teacher(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    fields = distill_fields(tmp_path, "top-k", mlflow_uri, engine_url)
    fields |= {"questions": questions(tmp_path, num_train=4), "top_k": 20, "skip_first_n_tokens": 0}
    fields |= {"num_steps": 8, "compute_post_kl": True, "teacher_prompt": "{question}"}
    fields |= {"teacher": {"checkpoint": make_teacher(engine_url).sampler}}
    result = self_distillation(SelfConfig.model_validate(fields))
    forward = curve(result, "teacher_kl/forward")
    assert 0 < forward[-1] < 0.6 * forward[0]
    for key in ("teacher_kl", "teacher_kl/dataset_0", "optim/entropy", "kl_pre_post_v2", "train_mean_nll"):
        assert len(curve(result, key)) == 8
    assert curve(result, "optim/kl_sample_train_v1") == []
    reverse = fields | {"run_name": "reverse", "objective": {"base_loss": "teacher_reverse_kl_topk"}}
    loss = curve(self_distillation(SelfConfig.model_validate(reverse)), "loss/base")
    assert 0 < loss[-1] < 0.7 * loss[0]


@pytest.mark.parametrize(
    ("method", "group"),
    [("on_policy", "rollout-0-1"), ("on_policy", "held-out-1"), ("off_policy", "rollout-0-1")],
)
def test_an_environment_that_hangs_warns(
    tmp_path: Path,
    engine_url: str,
    mlflow_uri: str,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    group: str,
) -> None:
    """The environment answers after the warning, so without it the run would never end."""
    monkeypatch.setattr(distill, "HEALTH", HealthLimits(hang_seconds=0.5, hang_factor=1.5))
    name, is_held_out = f"hangs-{method}-{group}", group.startswith("held-out")
    tag = {"tracking": mlflow_uri, "experiment": name, "tag": "tinker_flows.warning.health.hang"}
    letters = {"renderer_name": "role_colon", "group_size": 2, "num_batches": 1}
    silent = {"builder": "rollout_parts:SilentLettersBuilder"}
    silent["params"] = {**tag, **letters, "part": "turns", "is_held_out": is_held_out}
    fields = distill_fields(tmp_path, name, mlflow_uri, engine_url)
    fields |= {
        "experiment": name,
        "num_steps": 1,
        "eval_every": int(is_held_out),
        "datasets": [{"environment": silent}],
    }
    fields |= {"batch_size": 2}
    if method == "on_policy":
        result = on_policy_distillation(OnPolicyConfig.model_validate(fields))
    else:
        result = off_policy_distillation(OffPolicyConfig.model_validate(fields))
    (text,) = [text for text in result.warnings if "has not responded" in text]
    assert f"The environment, reward, hook or completer of {group} has not responded for" in text
    assert text.endswith("check it; rollout.timeout_s ends rollouts that take too long.")


def test_settings_of_rollouts_keep_the_cache_keys_of_earlier_runs() -> None:
    """The key of the cached teacher data contains this text."""
    earlier = "RolloutConfig(max_tokens=256, temperature=1.0, max_retries=2, min_successful=None, timeout_s=None)"
    assert repr(RolloutConfig()) == earlier
    assert "completer=" in repr(RolloutConfig.model_validate({"completer": {"builder": "a:b"}}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 1}, "top_k=1 would give its only target the weight 1"),
        ({"top_k": 20, "kl_penalty_coef": 0.5}, "kl_penalty_coef changes the advantages, but top_k uses none"),
        ({"top_k": 20, "train_on_rewards": True}, "train_on_rewards changes the advantages, but top_k uses none"),
        ({"skip_first_n_tokens": 1}, "skip_first_n_tokens requires soft targets"),
    ],
)
def test_contradicting_targets_are_rejected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    fields = distill_fields(tmp_path, "wrong", "") | {"datasets": [{"environment": {"builder": "a:b"}}]}
    with pytest.raises(ValueError, match=message):
        OnPolicyConfig.model_validate(fields | changes)


TEACHER_SAMPLES, GIVEN = {"environment": {"builder": "a:b"}}, {"data": {"builder": "a:b"}}
REVERSE = {"base_loss": "teacher_reverse_kl_topk"}


@pytest.mark.parametrize("dataset", [TEACHER_SAMPLES, GIVEN], ids=["sampled", "given"])
@pytest.mark.parametrize(
    "changes", [{}, {"rollout": {"temperature": 0.5}}, {"rollout": {"completer": {"builder": "a:b"}}}]
)
@pytest.mark.parametrize(
    "objective",
    [
        REVERSE,
        {"regularizers": [{"name": "watched", "fn": "label_divergence_topk", "weight": 0}]},
        {"regularizers": [{"name": "negative_entropy_topk"}]},
    ],
)
def test_weights_of_sampled_targets_are_not_read_as_a_distribution(
    tmp_path: Path, objective: dict[str, Any], changes: dict[str, Any], dataset: dict[str, Any]
) -> None:
    fields = distill_fields(tmp_path, "sampled", "") | {"top_k": 3, "objective": objective, **changes}
    config = OffPolicyConfig.model_validate(fields | {"datasets": [GIVEN, dataset]})
    bound = Objective.from_spec(config.objective)
    name = (bound.base or bound.regularizers[0]).term.name
    if dataset == TEACHER_SAMPLES and not changes and name != "negative_entropy_topk":
        with pytest.raises(ConfigError, match=f"The term {name} takes .* only on average: use cross_entropy"):
            check_targets(bound, config)
    else:
        check_targets(bound, config)


def test_a_run_checks_how_its_terms_read_the_targets(tmp_path: Path) -> None:
    fields = distill_fields(tmp_path, "sampled", "") | {"top_k": 3, "objective": REVERSE, "prompt": PROMPT}
    config = PromptConfig.model_validate(fields | {"questions": {"path": "questions.jsonl"}})
    with pytest.raises(ConfigError, match="The term teacher_reverse_kl_topk takes"):
        prompt_distillation.fn(config)


def test_prompted_completions_are_cached_and_learned(tmp_path: Path, engine_url: str, mlflow_uri: str) -> None:
    fields = distill_fields(tmp_path, "prompted", mlflow_uri, engine_url)
    fields |= {"questions": questions(tmp_path, num_train=4), "prompt": PROMPT, "top_k": 8, "learning_rate": 1e-3}
    result = prompt_distillation(PromptConfig.model_validate(fields))
    directory = RunStorage(url=fields["storage"]).run_directory("prompted")
    lines = (directory.read_bytes(TAUGHT_NAME) or b"").splitlines()
    assert [len(json.loads(line.partition(b" ")[2])) for line in lines] == [
        16,
        4,
    ]  # held-out, and train for both epochs
    assert json.loads(directory.read_bytes(TEACHERS) or b"") == {" base": ["tiny", ""]}
    assert len(set(curve(result, "test/nll_teacher"))) == 1
    measured = curve(result, "test/nll")
    stored = read_batch_values(directory)
    assert [stored[step]["test/nll"].mean()[0] for step in sorted(stored)] == pytest.approx(measured, rel=1e-5)
    assert len(measured) == 2
    first, last = curve(result, "teacher_kl/forward")
    assert 0 < last < first
    tags = MlflowClient(mlflow_uri).get_run(result.mlflow_run_id).data.tags
    assert "as for full fine-tuning" in tags["tinker_flows.warning.pitfall.learning_rate"]


def test_stored_teacher_data_depends_on_data_teacher_and_completer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only groups whose prompts are unknown depend on the data as a whole."""
    (folder := tmp_path / "teacher").mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"a")
    monkeypatch.syspath_prepend(str(tmp_path))
    (completer := tmp_path / "stored_completer.py").write_text("def complete() -> int:\n    return 1\n")
    import_module("stored_completer")  # as a run imports what it uses
    dataset = {"environment": environment(tmp_path), "teacher": {"model": str(folder)}}
    rollout = {"max_tokens": 12, "completer": {"builder": "stored_completer:complete"}}
    fields = distill_fields(tmp_path, "stored", "") | {"datasets": [dataset], "rollout": rollout}
    config = OffPolicyConfig.model_validate(fields)

    def stored() -> tuple[str, str]:
        return stored_under(config, config.datasets, ["teacher"])

    before = stored()
    assert stored() == before
    (tmp_path / "cache.jsonl").write_text("{}")
    assert stored() == before, "a builder may write to the folder of its data"
    questions(tmp_path, num_train=33)
    assert (stored()[0] == before[0], stored()[1] == before[1]) == (True, False)
    (folder / "model.safetensors").write_bytes(b"b")
    other_teacher = stored()
    completer.write_text("def complete() -> int:\n    return 2\n")
    assert len({before[0], other_teacher[0], stored()[0]}) == 3


def test_data_of_the_default_teacher_does_not_depend_on_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "current").mkdir()
    monkeypatch.chdir(folder)
    config = OffPolicyConfig.model_validate(
        distill_fields(tmp_path, "stored", "") | {"datasets": [{"environment": environment(tmp_path)}]}
    )
    before = stored_under(config, config.datasets, ["teacher"])
    (folder / "prefect.log").write_text("a line")
    assert stored_under(config, config.datasets, ["teacher"]) == before


def test_data_of_an_environment_depends_on_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (code := tmp_path / "stored_groups.py").write_text("def build() -> None: ...\n")
    import_module("stored_groups")
    dataset = {"environment": {"builder": "stored_groups:build"}}
    config = OffPolicyConfig.model_validate(distill_fields(tmp_path, "stored", "") | {"datasets": [dataset]})
    before = stored_under(config, config.datasets, ["teacher"])
    code.write_text("def build() -> int: ...\n")
    after = stored_under(config, config.datasets, ["teacher"])
    assert (after[0] == before[0], after[1] == before[1]) == (True, False)


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ([], "at least 1 item"),
        ([{}], "set either environment, for the teacher to complete, or data"),
        ([{"data": {"builder": "a:b"}}], "a dataset with `data` uses no teacher if top_k is 0"),
    ],
)
def test_invalid_datasets_are_rejected(tmp_path: Path, datasets: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OffPolicyConfig.model_validate(distill_fields(tmp_path, "wrong", "") | {"datasets": datasets})


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(3))
def test_on_policy_is_closer_to_the_teacher_than_off_policy(
    tmp_path: Path, engine_url: str, mlflow_uri: str, seed: int
) -> None:
    """Same start and eight questions: the student samples at each step, the teacher sampled once."""
    teacher = {"checkpoint": make_teacher(engine_url).sampler}

    def run(name: str, on_policy: bool, **changes: Any) -> TrainResult:
        fields = distill_fields(tmp_path, f"{name}-{seed}", mlflow_uri, engine_url)
        fields |= {"seed": seed, "batch_size": 8, "granularity": "segment", "checkpoint_every": 64, "eval_every": 64}
        groups = environment(tmp_path, num_train=8, group_size=8 if on_policy else 1)
        fields |= {"datasets": [{"environment": groups, "teacher": teacher}], **changes}
        if on_policy:
            return on_policy_distillation(OnPolicyConfig.model_validate(fields))
        return off_policy_distillation(OffPolicyConfig.model_validate(fields))

    start = run("near", False, num_steps=8).state_path
    more = {"num_steps": 64, "init_from": start, "learning_rate": 2e-3, "lr_schedule": "linear"}
    student, reader = (run(f"on-{on}", on, **more) for on in (True, False))
    before, after = curve(student, "test/teacher_kl")
    assert before > 0.4
    assert after < 0.4
    assert after < curve(reader, "test/teacher_kl")[-1]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(3))
def test_prompt_distillation_learns_the_prompt(tmp_path: Path, engine_url: str, mlflow_uri: str, seed: int) -> None:
    """The student has the teacher's weights and lacks only the prompt."""
    weights = make_teacher(engine_url, PROMPT)
    fields = distill_fields(tmp_path, f"learned-{seed}", mlflow_uri, engine_url)
    fields |= {"questions": {**questions(tmp_path, num_train=40), "group_size": 8}, "prompt": PROMPT, "top_k": 16}
    fields |= {"init_from": weights.state, "teacher": {"checkpoint": weights.sampler}, "seed": seed, "batch_size": 8}
    fields |= {"learning_rate": 5e-3, "lr_schedule": "linear", "granularity": "segment"}
    fields |= {"num_steps": 150, "eval_every": 150, "checkpoint_every": 150}
    result = prompt_distillation(PromptConfig.model_validate(fields))
    first, last = curve(result, "test/nll")
    with_prompt = curve(result, "test/nll_teacher")[0]
    assert first - with_prompt > 0.3
    assert last - with_prompt < 0.2 * (first - with_prompt)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_completes(
    tmp_path: Path, engine_url: str, mlflow_uri: str, monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    monkeypatch.chdir(ROOT)
    place = {"model": "tiny", "base_url": engine_url, "storage": str(tmp_path), "tracking": mlflow_uri}
    fields = yaml.safe_load((ROOT / "examples" / f"{recipe}.yaml").read_text()) | place
    result = flow_of(recipe)(config_type_of(recipe).model_validate(fields))
    assert not result.stopped
    assert result.num_steps == fields["num_steps"]
