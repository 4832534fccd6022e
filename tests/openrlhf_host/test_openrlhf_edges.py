"""Runs at their edges: data that don't divide, losses that average in their own way, rewards that teach nothing."""

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need openrlhf (requirements/openrlhf.txt)")

import local_ray
import openrlhf_async
import openrlhf_controller
import torch
import workers
from openrlhf_controller import Engine, build
from test_openrlhf_config import A3PO, PERIODIC, check

from metronome.errors import ConfigurationError, MetronomeError
from metronome_openrlhf import trainer as trainer_module
from metronome_openrlhf.checks import check_change
from metronome_openrlhf.weights import Movement

OURS = {"loss": "a3po"}
STREAMED = {"rollout_source": "periodic"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    openrlhf_controller.install(monkeypatch.setattr)
    local_ray.order.seed(0)
    return tmp_path


def norms(made):
    made.fit()
    return [one.status["actor_grad_norm"] for one in made.logs]


# --- windows that come out half filled ------------------------------------------------------------------


def test_what_half_fills_a_window_at_the_end_of_the_data_doesnt_stop_openrlhfs_trainer(folder):
    """OpenRLHF takes no step there and shows the norm of the one before; 10 prompts in batches of 4."""
    flags = {"data__max_samples": 10, "train__num_episodes": 2}
    plain = build(folder, None, **flags)
    plain.fit()
    made = build(folder, OURS, **flags)
    made.fit()
    assert len(made.logs) == len(plain.logs) == 6
    taken = [one.status["metronome/weights/changed"] for one in made.logs]
    assert taken == [1, 1, 0, 1, 1, 1]  # the second episode begins with half a window
    assert [one.status["metronome/weights/lr"] > 0 for one in made.logs] == [bool(one) for one in taken]
    assert made.worker.actor.model.global_steps == plain.worker.actor.model.global_steps == 5
    assert made.engines[0].versions == [1, 2, 3, 4, 5, 6]


def test_a_window_of_two_batches_is_stepped_in_every_second(folder):
    made = build(folder, OURS, train__batch_size=32)
    made.fit()
    assert [one.status["metronome/weights/changed"] for one in made.logs] == [0, 1, 0, 1]


def test_a_step_that_was_taken_and_moved_nothing_still_stops_the_run(folder, monkeypatch):
    made = build(folder, OURS, actor__adam__lr=1e-60)
    with pytest.raises(MetronomeError, match="changed no weight"):
        made.fit()


def test_a_step_that_deepspeed_skips_has_no_rate():
    """In fp16 it counts a step that overflowed, and says so in ``skipped_steps``."""
    engine = type("Engine", (), {})()
    engine.module = torch.nn.Linear(2, 2)
    engine.optimizer = torch.optim.SGD(engine.module.parameters(), lr=0.1)
    engine.global_steps = engine.skipped_steps = 0
    movement = Movement()
    for skipped, rate in ((1, 0.0), (0, 0.1)):
        movement.before_step(engine)
        engine.global_steps += 1
        engine.skipped_steps += skipped
        status = {"actor_grad_norm": 1.0, **movement.publish(engine)}
        assert status["metronome/weights/lr"] == pytest.approx(rate)
        if skipped:
            check_change(status, "here")
        else:
            with pytest.raises(MetronomeError, match="changed no weight"):
                check_change(status, "here")


# --- what a loss averages by ----------------------------------------------------------------------------


def test_gspo_by_parts_is_averaged_over_rows_as_openrlhf_does_whatever_is_set(folder):
    flags = {"actor__policy_loss_type": "gspo", "actor__max_norm": 0.5}
    expected = norms(build(folder, None, **flags))
    made = build(folder, STREAMED, **flags)
    assert norms(made)[0] == pytest.approx(expected[0], rel=1e-5)
    assert norms(build(folder, STREAMED, actor__max_norm=0.5))[0] != pytest.approx(expected[0], rel=0.05)


def test_gspo_has_no_room_for_terms_that_are_averaged_over_tokens():
    gspo = (*PERIODIC, "--actor.policy_loss_type", "gspo")
    _, notes = check(*gspo)
    assert [one for one in notes if "--actor.loss_agg_mode seq-mean-token-mean" in one]
    with pytest.raises(ConfigurationError, match="no single rescaling"):
        check(*gspo, "--actor.entropy_coef", "0.1")


# --- other models, other engines ------------------------------------------------------------------------


def test_the_batch_size_that_is_set_fits_every_models_ranks():
    """DeepSpeed asserts it for each engine; here 24 rows, 2 ranks of the actor and 8 of the reference."""
    flags = (*PERIODIC, "--rollout.batch_size", "6", "--train.micro_batch_size", "1", "--actor.num_gpus_per_node", "2")
    assert check(*flags)[0].train.batch_size == 24
    args, _ = check(*flags, "--algo.kl.init_coef", "0.1", "--ref.num_gpus_per_node", "16")
    assert args.train.batch_size == 32


def test_sleeping_engines_are_woken_before_their_weights_are_read(folder, monkeypatch):
    log = []

    class Sleeping(Engine):
        asleep = True

        def fingerprint(self):
            assert not self.asleep, "the memory isn't mapped"
            return super().fingerprint()

    def call(engines, name, *_, **named):
        log.append((name, named.get("tags")))
        for one in engines:
            one._target.asleep = name == "sleep"

    for module in (trainer_module, *openrlhf_controller.MODULES):
        if hasattr(module, "batch_vllm_engine_call"):
            monkeypatch.setattr(module, "batch_vllm_engine_call", call)
    made = build(folder, OURS, engines=[Sleeping()])
    made.args.vllm.enable_sleep = True
    made.fit()
    assert len(made.logs) == 4
    assert ("wake_up", ["weights"]) in log


def test_a_cut_distribution_is_told_where_its_log_probs_stand_for_the_old_policys():
    def told(*flags):
        return [one for one in check(*flags)[1] if "--rollout.top_p" in one]

    assert told(*A3PO, "--rollout.top_p", "0.5")
    assert not told(*A3PO)
    assert not told(*A3PO, "--rollout.top_p", "0.5", "--metronome.a3po.proximal", "recompute")
    assert not told(*PERIODIC, "--rollout.top_p", "0.5")


# --- rewards and responses that teach nothing -----------------------------------------------------------


@pytest.mark.parametrize("block", [STREAMED, {**STREAMED, **OURS}, OURS], ids=["periodic", "periodic a3po", "a3po"])
def test_groups_with_equal_rewards_leave_the_weights_as_they_are_and_the_run_goes_on(folder, block):
    engine = Engine()
    engine.score = lambda prompt, member: 0.5
    made = build(folder, block, engines=[engine])
    assert norms(made) == [0, 0, 0, 0]
    assert [one.status["metronome/weights/changed"] for one in made.logs] == [0, 0, 0, 0]


class Silent(Engine):
    """One member of each group has no response."""

    def response(self, prompt, label, tokenizer, member):
        found = super().response(prompt, label, tokenizer, member)
        if member != 1:
            return found
        end = found["action_ranges"][0][0]
        cut = {"observation_tokens": found["observation_tokens"][:end], "action_ranges": [], "metronome_spans": []}
        return {**found, **cut, "rollout_log_probs": found["rollout_log_probs"][:end]}


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_a_member_without_a_response_counts_in_its_groups_advantages_and_in_no_mean(folder, mode):
    flags = {"actor__loss_agg_mode": mode, "rollout__micro_batch_size": 4}
    found = {}
    for name, block in {
        "periodic": STREAMED,
        "shared": {**STREAMED, "attention": "shared_prompt"},
        "synchronous": {"attention": "shared_prompt"},
    }.items():
        made = build(folder, block, engines=[Silent()], **flags)
        found[name] = norms(made)
    assert found["shared"] == pytest.approx(found["periodic"], rel=2e-3)
    assert found["synchronous"][0] == pytest.approx(found["periodic"][0], rel=1e-5)
    assert norms(build(folder, STREAMED, **flags))[0] != pytest.approx(found["periodic"][0], rel=1e-3)


@pytest.mark.parametrize("block", [STREAMED, {**STREAMED, "attention": "shared_prompt"}])
def test_responses_cut_at_the_longest_row_train_what_is_left(folder, block):
    expected = norms(build(folder, None, data__max_len=8))
    assert norms(build(folder, block, data__max_len=8))[0] == pytest.approx(expected[0], rel=1e-5)


def test_two_episodes_and_fewer_prompts_than_a_batch(folder):
    made = build(folder, STREAMED, data__max_samples=2, train__num_episodes=2)
    made.fit()
    assert [one.status["metronome/periodic/rows"] for one in made.logs] == [8, 8]
    assert [one.states["total_consumed_prompts"] for one in made.logs] == [2, 4]
    assert made.max_steps == 2


# --- bounded --------------------------------------------------------------------------------------------


@pytest.fixture
def asynchronous(tmp_path, monkeypatch):
    openrlhf_async.install(monkeypatch.setattr)
    yield tmp_path
    openrlhf_async.stop()


@pytest.mark.parametrize("queue", [1, 2, 4])
@pytest.mark.parametrize("part", ["rows", "reward"])
def test_a_bounded_run_ends_with_the_error_of_either_side(asynchronous, queue, part):
    """Nobody waits for an actor that is dead."""
    made = openrlhf_async.build(asynchronous, {"bounded": {"max_staleness": queue}})
    if part == "rows":
        made.worker.fit = lambda *_, **__: (_ for _ in ()).throw(MemoryError("no room"))
        with pytest.raises(MemoryError, match="no room"):
            made.fit()
    else:
        made.engines[0].score = lambda *_: None
        with pytest.raises(MetronomeError, match="without a reward"):
            made.fit()
    assert workers.weights(made.worker).isfinite().all()
