"""What a mode needs is set and said, or refused with the line to add: on verl's own composed configuration."""

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")

from pathlib import Path

import numpy as np
import torch
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos

from metronome.errors import ConfigurationError
from metronome_verl.config import arrange, block_of, worker_part

CONFIG = str(Path(verl.__file__).parent / "trainer" / "config")
OF_THE_BATCH = ("gae", "remax", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo", "gpg", "a_new_one")
POOL = [
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
]


def composed(*overrides):
    with initialize_config_dir(config_dir=CONFIG, version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                "trainer.v1.trainer_mode=metronome",
                "trainer.device=cpu",
                "algorithm.adv_estimator=grpo",
                *overrides,
            ],
        )


def arranged(*overrides):
    config = composed(*overrides)
    return config, arrange(config)


def test_without_a_block_the_trainer_is_verl_s_own():
    config, found = arranged()
    assert found.mode == "synchronous"
    assert config.trainer.v1.trainer_mode == "sync"
    assert found.notes == ()
    part = worker_part(config.actor_rollout_ref)
    assert (part.loss, part.attention) == (None, None)


def test_periodic_sets_what_it_needs_and_says_so():
    config, found = arranged("+metronome.rollout_source=periodic", "data.train_batch_size=6", *POOL)
    assert config.trainer.v1.trainer_mode == "separate_async"
    assert config.actor_rollout_ref.hybrid_engine is False
    assert config.trainer.v1.separate_async.num_warmup_batches == 0
    steps = config.trainer.v1.separate_async.parameter_sync_step
    assert steps * config.actor_rollout_ref.actor.ppo_mini_batch_size == config.data.train_batch_size == 6
    assert config.actor_rollout_ref.actor.use_dynamic_bsz is True
    said = "\n".join(found.notes)
    for key in ("hybrid_engine=False", "num_warmup_batches=0", "use_dynamic_bsz=True"):
        assert key in said
    again = arrange(config)
    assert again.notes == ()  # nothing is left to set


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (POOL[1:], "rollout.nnodes"),
        (POOL[:2], "checkpoint_engine.backend=nccl"),
        ([*POOL, "actor_rollout_ref.actor.ppo_epochs=2"], "ppo_epochs=1"),
        *(
            ([*POOL, f"algorithm.adv_estimator={name}"], "adv_estimator=grpo")
            for name in (
                "gae",
                "remax",
                "reinforce_plus_plus",
                "reinforce_plus_plus_baseline",
                "gdpo",
                "gpg",
                "a_new_one",
            )
        ),
        ([*POOL, "algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive"], "kl_ctrl.type=fixed"),
        ([*POOL, "algorithm.rollout_correction.rollout_is_batch_normalize=True"], "batch_normalize=False"),
        ([*POOL, "trainer.critic_warmup=2"], "critic_warmup=0"),
    ],
)
def test_what_breaks_a_period_is_refused_with_the_line_to_add(overrides, words):
    with pytest.raises(ConfigurationError, match=words):
        arranged("+metronome.rollout_source=periodic", *overrides)


def test_a_loss_of_ours_takes_the_rollout_s_log_probs_and_reaches_the_worker():
    config, found = arranged("+metronome.loss=a3po", "+metronome.a3po.cap=4.0", "+metronome.attention=shared_prompt")
    assert config.algorithm.rollout_correction.bypass_mode is True
    assert config.actor_rollout_ref.rollout.calculate_log_probs is True
    part = worker_part(config.actor_rollout_ref)
    assert part.loss.name == "a3po"
    assert part.attention.shares_prompt
    assert block_of(config)["a3po"] == {"cap": 4.0}
    assert any("bypass_mode=True" in note for note in found.notes)


def test_two_weights_for_one_sample_are_refused():
    with pytest.raises(ConfigurationError, match="rollout_correction"):
        arranged("+metronome.loss=a3po", "algorithm.rollout_correction.rollout_is=token")


def test_the_controller_s_g_becomes_verl_s():
    config, found = arranged("+metronome.group_controller=sagc", "+metronome.sagc.sizes=[4,8]")
    assert config.actor_rollout_ref.rollout.n == found.selection.group_controller.size() == 8
    assert config.actor_rollout_ref.actor.use_dynamic_bsz is True


def test_bad_keys_are_named_with_the_nearest():
    with pytest.raises(ConfigurationError, match="rollout_source"):
        arranged("+metronome.rolout_source=periodic")
    with pytest.raises(ConfigurationError, match="must be a mapping"):
        arranged("+metronome=periodic")


def test_a_worker_of_another_trainer_is_refused():
    with pytest.raises(ConfigurationError, match="trainer_mode=metronome"):
        worker_part(OmegaConf.create({"rollout": {"custom": {}}}))


@pytest.mark.parametrize("name", ["grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo"])
def test_estimators_of_one_group_are_served_and_give_the_same_alone_and_in_a_batch(name):
    one = "trainer.n_gpus_per_node=1"  # so that verl adds no rows: test_algorithms
    arranged("+metronome.rollout_source=periodic", f"algorithm.adv_estimator={name}", one, *POOL)
    estimate = core_algos.get_adv_estimator_fn(name)
    draw = torch.Generator().manual_seed(0)
    rewards, mask = torch.randn(8, 5, generator=draw), torch.ones(8, 5)
    uids = np.array(["a"] * 4 + ["b"] * 4, dtype=object)
    config = core_algos.AlgoConfig()

    def advantages(rows):
        return estimate(token_level_rewards=rewards[rows], response_mask=mask[rows], index=uids[rows], config=config)[0]

    whole = advantages(slice(0, 8))
    assert torch.allclose(torch.cat([advantages(slice(0, 4)), advantages(slice(4, 8))]), whole, atol=1e-6)


def test_an_estimator_that_whitens_the_batch_gives_other_advantages_in_parts():
    estimate = core_algos.get_adv_estimator_fn("reinforce_plus_plus_baseline")
    rewards, mask = torch.randn(8, 5, generator=torch.Generator().manual_seed(0)), torch.ones(8, 5)
    uids = np.array(["a"] * 4 + ["b"] * 4, dtype=object)
    parts = [
        estimate(token_level_rewards=rewards[r], response_mask=mask[r], index=uids[r])[0]
        for r in (slice(4), slice(4, 8))
    ]
    whole = estimate(token_level_rewards=rewards, response_mask=mask, index=uids)[0]
    assert (torch.cat(parts) - whole).abs().max() > 1e-2


def test_bounded_mode_refuses_a_number_of_prompts_that_follows_g():
    ours = ["+metronome.rollout_source=bounded", "+metronome.group_controller=sagc", "+metronome.sagc.sizes=[4,8]"]
    with pytest.raises(ConfigurationError, match="budget=fixed_prompts"):
        arranged(*ours, *POOL)
    arranged(*ours, "+metronome.sagc.budget=fixed_prompts", *POOL)


def test_a_rollout_engine_that_follows_no_seeds_by_prompt_is_told():
    _, found = arranged("+metronome.rollout_source=periodic", *POOL, "actor_rollout_ref.rollout.name=vllm")
    assert any("don't follow seeds" in note for note in found.notes)
    _, found = arranged("+metronome.rollout_source=periodic", *POOL, "actor_rollout_ref.rollout.name=metronome_hf")
    assert not any("don't follow seeds" in note for note in found.notes)


def test_our_losses_take_verl_s_clip_and_say_so():
    clip = ["actor_rollout_ref.actor.clip_ratio_low=0.1", "actor_rollout_ref.actor.clip_ratio_high=0.28"]
    config, found = arranged("+metronome.loss=a3po", *clip)
    options = worker_part(config.actor_rollout_ref).loss.options
    assert (options.clip_low, options.clip_high, options.dual_clip) == (0.1, 0.28, None)
    assert any("metronome.a3po.clip_high=0.28" in note for note in found.notes)
    config, _ = arranged("+metronome.loss=ppo", *clip, "actor_rollout_ref.actor.clip_ratio_c=4")
    options = worker_part(config.actor_rollout_ref).loss.options
    assert (options.clip_low, options.clip_high, options.dual_clip) == (0.1, 0.28, 4.0)
    config, found = arranged("+metronome.loss=a3po", *clip, "+metronome.a3po.clip_high=0.5")
    assert worker_part(config.actor_rollout_ref).loss.options.clip_high == 0.5  # ours, where it is given


def test_verl_s_other_policy_losses_beside_ours_are_refused():
    with pytest.raises(ConfigurationError, match=r"takes the place of verl's policy loss.*'gspo'"):
        arranged("+metronome.loss=a3po", "actor_rollout_ref.actor.policy_loss.loss_mode=gspo")
    arranged("actor_rollout_ref.actor.policy_loss.loss_mode=gspo")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.v1.sampler.custom_sampler.path=mine.py"], "a replay buffer of its own"),
        (["skip.rollout_tq.enable=True"], "the cache of rollouts"),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=sapo"], "a denominator of its own"),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov"], "ranks or averages over a micro-batch"),
        (["actor_rollout_ref.actor.loss_agg_mode=bogus"], "can't be added up"),
        (["actor_rollout_ref.actor.strategy=veomni"], "where this engine keeps the gradients"),
        (["data.train_batch_size=0"], "at least one prompt"),
    ],
)
def test_what_a_period_would_ignore_or_get_wrong_is_refused_before_anything_starts(overrides, words):
    with pytest.raises(ConfigurationError, match=words):
        arranged("+metronome.rollout_source=periodic", *POOL, *overrides)


def test_shared_prompts_keep_groups_whole_and_refuse_what_can_t_share_at_the_start():
    config, found = arranged("+metronome.attention=shared_prompt", "actor_rollout_ref.actor.shuffle=True")
    assert config.actor_rollout_ref.actor.use_dynamic_bsz is True
    assert any("groups stay whole" in note for note in found.notes)
    assert any("less is shared" in note for note in found.notes)
    for wrong in ("actor.ulysses_sequence_parallel_size=2", "model.use_fused_kernels=True"):
        with pytest.raises(ConfigurationError, match=r"Ulysses|used kernels"):
            arranged(
                "+metronome.attention=shared_prompt",
                "actor_rollout_ref.actor.strategy=fsdp2",
                f"actor_rollout_ref.{wrong}",
            )


def test_a_controller_beside_a_critic_is_refused():
    with pytest.raises(ConfigurationError, match="a critic's mini-batches follow one G"):
        arranged("+metronome.group_controller=sagc", "algorithm.adv_estimator=gae")
