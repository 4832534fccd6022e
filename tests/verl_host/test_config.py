"""What a mode needs is set and said, or refused with the line to add: on verl's own composed configuration."""

import pytest

verl = pytest.importorskip("verl")

from pathlib import Path  # noqa: E402

from hydra import compose, initialize_config_dir  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402

from metronome.errors import ConfigurationError  # noqa: E402
from metronome_verl.config import arrange, block_of, worker_part  # noqa: E402

CONFIG = str(Path(verl.__file__).parent / "trainer" / "config")
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
        ([*POOL, "algorithm.adv_estimator=gae"], "adv_estimator=grpo"),
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
