"""verl's unmodified ``main_ppo`` on a CPU, with our package found by its entry point."""

import math

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")
pytest.importorskip("transfer_queue", reason="verl's V1 trainer needs TransferQueue (requirements/verl.txt)")

import ray_session
from ray_session import run_main_ppo

from metronome_verl.cpu import assets

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return assets.make(tmp_path_factory.mktemp("assets"))


@pytest.fixture(scope="module")
def session(request):
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def progress(line):
        with capture.global_and_fixture_disabled():
            print(f"\n  verl: {line}", end="", flush=True)

    return ray_session.shared_session(progress)


def overrides(tiny, *more):
    """A GRPO run of 4 prompts x 4 responses of at most 16 tokens, FSDP2 in float32 on one rank; ``more`` comes last."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return [
        "model_engine=dp",
        "algorithm.adv_estimator=grpo",
        "algorithm.use_kl_in_reward=False",
        f"data.train_files={tiny.train}",
        f"data.val_files={tiny.validation}",
        "data.train_batch_size=4",
        "data.max_prompt_length=48",
        "data.max_response_length=16",
        "data.dataloader_num_workers=0",
        f"actor_rollout_ref.model.path={tiny.model}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        f"{actor}.strategy=fsdp2",
        f"{actor}.fsdp_config.strategy=fsdp2",
        f"{actor}.fsdp_config.use_torch_compile=False",
        f"{actor}.use_torch_compile=False",
        f"{actor}.fsdp_config.model_dtype=fp32",
        f"+{actor}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
        f"{actor}.optim.lr=1e-3",
        f"{actor}.ppo_mini_batch_size=4",
        f"{actor}.ppo_micro_batch_size_per_gpu=4",
        f"{actor}.use_kl_loss=False",
        f"{rollout}.name=metronome_hf",
        f"{rollout}.n=4",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.log_prob_micro_batch_size_per_gpu=4",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.agent.num_workers=1",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={tiny.reward}",
        "reward.custom_reward_function.name=compute_score",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.nnodes=1",
        "trainer.logger=[console]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.total_epochs=1",
        "trainer.total_training_steps=2",
        *more,
    ]


@pytest.mark.timeout(900)
def test_stock_main_ppo_trains_in_the_cpu_room(tiny, session):
    output = run_main_ppo(overrides(tiny), session, timeout=840)
    assert output.returncode == 0, output.tail()
    assert [step["step"] for step in output.metrics] == [1, 2]
    for step in output.metrics:
        assert math.isfinite(step["actor/grad_norm"])
        assert step["actor/grad_norm"] > 0.1
        assert step["actor/lr"] == 1e-3  # so step 1 moved the weights well beyond the tolerance below
        # The server's forward and the trainer's agree, in step 2 with the weights that step 1 published (one step
        # behind, they differ by 0.01) ...
        assert step["training/rollout_probs_diff_max"] < 1e-6
        # ... and the samples say so: verl subtracts their version from the trainer's.
        assert step["training/off_policy/trajectory_staleness/max"] == 0


POOL = [
    "trainer.v1.trainer_mode=metronome",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=metronome_ray",
    "+actor_rollout_ref.rollout.engine_kwargs.metronome_hf.seconds_per_token=0.03",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=4096",
]


@pytest.mark.timeout(900)
def test_all_four_hooks_train_in_periodic_mode(tiny, session):
    ours = [
        "+metronome.rollout_source=periodic",
        "+metronome.loss=a3po",
        "+metronome.attention=shared_prompt",
        "+metronome.group_controller=sagc",
        "+metronome.sagc.sizes=[2,4]",
        "trainer.total_training_steps=3",
        "actor_rollout_ref.rollout.max_num_seqs=4",  # a group after the other, so that they arrive one by one
    ]
    output = run_main_ppo(overrides(tiny, *POOL, *ours), session, timeout=840)
    assert output.returncode == 0, output.tail()
    assert "metronome: actor_rollout_ref.hybrid_engine=False" in output.text
    assert [step["step"] for step in output.metrics] == [1, 2, 3]
    for step in output.metrics:
        assert step["training/off_policy/trajectory_staleness/max"] == 0
        assert step["training/off_policy/trajectory_spans/max"] == 1
        assert step["metronome/loss/calls"] >= step["metronome/periodic/parts"] >= 1
        assert step["metronome/attention/calls"] > 0
        assert step["metronome/attention/tokens_fed"] < step["metronome/attention/tokens_separate"]
        assert step["metronome/group_controller/size"] in (2, 4)
        assert math.isfinite(step["actor/grad_norm"])
        assert step["metronome/tpspd"] > 0
    assert max(step["metronome/periodic/parts"] for step in output.metrics) > 1  # trained while others were generated


@pytest.mark.timeout(900)
def test_a3po_trains_samples_that_are_two_versions_old_in_bounded_mode(tiny, session):
    ours = [
        "+metronome.rollout_source=bounded",
        "+metronome.bounded.max_staleness=2",
        "+metronome.loss=a3po",
        "trainer.v1.separate_async.num_warmup_batches=2",
        "trainer.v1.separate_async.parameter_sync_step=1",
        # 3 s a response: longer than an update, so that requests run at publications
        "actor_rollout_ref.rollout.engine_kwargs.metronome_hf.seconds_per_token=0.2",
        "trainer.total_training_steps=6",
    ]
    output = run_main_ppo(overrides(tiny, *POOL, *ours), session, timeout=840)
    assert output.returncode == 0, output.tail()
    print({name: value for name, value in output.metrics[-1].items() if "metronome" in name})
    staleness = [step["metronome/loss/staleness_max"] for step in output.metrics]
    assert max(staleness) == 2
    stale = output.metrics[staleness.index(2)]
    assert stale["metronome/loss/off_behavior"] > 0  # the proximal policy isn't the behaviour policy there
    assert stale["metronome/loss/calls"] > 0
    # in_flight=resume, the default: a response has tokens of two versions at least, and the version of each is known
    assert max(step["training/off_policy/trajectory_spans/max"] for step in output.metrics) >= 2
    assert all(step["metronome/loss/version_unknown"] == 0 for step in output.metrics)
