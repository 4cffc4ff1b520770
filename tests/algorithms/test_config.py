"""Every contradiction is an error that names both values and the remedy."""

from dataclasses import replace

import pytest

from vla_rl.algorithms.advantages import GaeSettings
from vla_rl.algorithms.batches import require_divisible
from vla_rl.algorithms.config import AlgorithmConfig, CriticSettings, GroupSettings
from vla_rl.algorithms.corrections import Correction
from vla_rl.config import ConfigError, build, to_plain

GRPO = AlgorithmConfig("group_mean", episodes_per_step=64, critic=None, group=GroupSettings(8), normalize_advantages=False)


def test_recipes_round_trip():
    for config in (AlgorithmConfig(), GRPO):
        assert build(AlgorithmConfig, to_plain(config)) == config
    recipe = {"advantage": "leave_one_out", "critic": None, "group": {"size": 4, "scale": "none"}, "episodes_per_step": 12}
    assert build(AlgorithmConfig, recipe).groups_per_step == 3
    assert AlgorithmConfig().groups_per_step == 64


def test_critic_warm_up_holds_the_policy():
    config = AlgorithmConfig(critic=CriticSettings(warmup_steps=2))
    assert [config.policy_coefficient(step) for step in range(4)] == [0.0, 0.0, 1.0, 1.0]
    assert GRPO.policy_coefficient(0) == 1.0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_staleness": 1}, r"max_staleness is 1, .*correction.kind is 'none'; choose 'behaviour_clip' .*'truncated' or 'decoupled'"),
        ({"correction": {"kind": "truncated"}}, r"'truncated' compares with recomputed.*set old_log_prob: recompute"),
        (
            {"correction": {"kind": "behaviour_clip"}, "old_log_prob": "recompute"},
            r"'behaviour_clip' takes the ratio.*old_log_prob: rollout",
        ),
        ({"critic": None}, r"'gae' needs a critic and has no groups"),
        ({"group": {}}, r"'gae' needs a critic and has no groups"),
        ({"advantage": "group_mean"}, r"'group_mean' needs groups and has no critic: give group: \{size: 8\} and critic: null"),
        ({"aggregation": "fixed_divisor"}, r"aggregation is 'fixed_divisor' and fixed_divisor is None"),
        ({"fixed_divisor": 20.0}, r"aggregation is 'element_mean' and fixed_divisor is 20\.0"),
        ({"global_batch_size": 100, "micro_batch_size_per_rank": 64}, r"global_batch_size is 100 and micro_batch_size_per_rank is 64: 36"),
        ({"episodes_per_step": 0}, r"episodes_per_step is 0; allowed: at least 1"),
        ({"epochs": 0}, r"epochs is 0; allowed: at least 1"),
        ({"max_staleness": -1}, r"max_staleness is -1; allowed: at least 0"),
        ({"entropy_coefficient": -0.1}, r"entropy_coefficient is -0\.1; allowed: at least 0"),
        ({"target_kl": 0.0}, r"target_kl is 0\.0; allowed: above 0, or none"),
        ({"kl": {"kind": "k3"}}, r"kl.kind is 'k3' and kl.coefficient is 0\.0"),
        ({"kl": {"coefficient": 0.1}}, r"kl.kind is 'none' and kl.coefficient is 0\.1"),
        ({"kl": {"kind": "k1", "coefficient": 0.1}}, r"'k1' has no gradient in expectation"),
        ({"kl": {"kind": "velocity", "coefficient": 0.1, "place": "reward"}}, r"'velocity' works through its gradient"),
        ({"distillation": {"kind": "velocity"}}, r"distillation.kind is 'velocity' and distillation.coefficient is 0\.0"),
        ({"distillation": {"bound": 0.0}}, r"distillation.bound is 0\.0; allowed: above 0"),
        ({"cloning": {"coefficient": -1.0}}, r"cloning.coefficient is -1\.0; allowed: at least 0"),
        ({"cloning": {"full_at_kl": 0.0}}, r"cloning.full_at_kl is 0\.0; allowed: above 0, or none"),
        ({"cloning": {"global_batch_size": 0}}, r"cloning.global_batch_size is 0; allowed: at least 1"),
        ({"critic": {"coefficient": 0.0}}, r"critic.coefficient is 0\.0; allowed: above 0$"),
        ({"critic": {"huber_delta": -1.0}}, r"critic.huber_delta is -1\.0; allowed: above 0, or none"),
        ({"critic": {"warmup_steps": -1}}, r"critic.warmup_steps is -1; allowed: at least 0"),
        ({"group": {"size": 1}}, r"group.size is 1; allowed: at least 2"),
        ({"aggregation": "token_mean"}, r"aggregation is 'token_mean'.*allowed: element_mean, episode_mean, episode_sum, fixed_divisor"),
        ({"clip": {"hihg": 0.3}}, r"unknown key 'clip.hihg'; did you mean 'clip.high'"),
    ],
)
def test_contradictions(values, message):
    with pytest.raises(ConfigError, match=message):
        build(AlgorithmConfig, values)


def test_group_contradictions():
    with pytest.raises(ConfigError, match=r"episodes_per_step is 12 and group.size is 8: 4 would be left over.*such as 8 or 16"):
        replace(GRPO, episodes_per_step=12)
    with pytest.raises(ConfigError, match=r"normalize_advantages is true and group.scale is 'unbiased'.*scaled twice"):
        replace(GRPO, normalize_advantages=True)
    assert replace(GRPO, normalize_advantages=True, group=GroupSettings(8, "none")).normalize_advantages


def test_asynchronous_with_a_choice_is_allowed():
    assert AlgorithmConfig(max_staleness=2, correction=Correction("behaviour_clip")).max_staleness == 2
    for kind in ("truncated", "decoupled"):
        assert AlgorithmConfig(max_staleness=1, correction=Correction(kind), old_log_prob="recompute").correction.needs_proximal


@pytest.mark.parametrize(
    ("whole", "part", "message"),
    [
        (6, 4, r"envs is 6 and workers is 4: 2 would be left over.*such as 4 or 8"),
        (3, 4, r"3 would be left over.*such as 4$"),
        (4, 0, r"both"),
    ],
)
def test_remainders_name_both_numbers(whole, part, message):
    require_divisible("envs", 8, "workers", 4)
    with pytest.raises(ConfigError, match=message):
        require_divisible("envs", whole, "workers", part)


def test_gae_settings_are_part_of_the_recipe():
    assert build(AlgorithmConfig, {"gae": {"discount": 0.9, "discounting": "chunk"}}).gae == GaeSettings(0.9, discounting="chunk")
