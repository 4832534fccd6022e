"""The periodic step on OpenRLHF's own controller, experience maker and actor: equal to its synchronous one."""

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need openrlhf (requirements/openrlhf.txt)")

from dataclasses import replace
from types import SimpleNamespace

import local_ray
import openrlhf_controller
import torch
import workers
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker
from openrlhf.trainer.ray.launcher import BaseModelActor
from openrlhf_controller import Engine, Group, build

from metronome.errors import ConfigurationError, MetronomeError, VersionMismatch
from metronome_openrlhf.samples import Arriving
from metronome_openrlhf.weights import fingerprint

PERIODIC = {"rollout_source": "periodic"}
SAGC = {"group_controller": "sagc", "sagc": {"sizes": [2, 4], "start": 4, "min_dwell": 1}}
FILTERED = {"algo__dynamic_filtering_enable": True, "algo__dynamic_filtering_range": (0.05, 0.95)}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    openrlhf_controller.install(monkeypatch.setattr)
    monkeypatch.setattr(local_ray, "together", 1)
    local_ray.order.seed(0)
    return tmp_path


def statuses(made):
    made.fit()
    return [one.status for one in made.logs]


CASES = {
    "group_norm": {},
    "rloo, KL in the loss": {
        "algo__advantage__estimator": "rloo",
        "algo__kl__use_loss": True,
        "algo__kl__init_coef": 0.05,
        "algo__kl__estimator": "k3",
        "actor__entropy_coef": 0.01,
    },
    "dr_grpo, KL in the reward": {
        "algo__advantage__estimator": "dr_grpo",
        "algo__kl__init_coef": 0.05,
        "actor__loss_agg_mode": "seq-mean-token-mean",
    },
    "length penalties": {"reward__overlong_buffer_len": 6, "reward__stop_properly_penalty_coef": 0.5},
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_by_parts_takes_openrlhfs_own_steps(folder, name, monkeypatch):
    flags, kl = {**CASES[name], "actor__max_norm": 0.5}, "KL" in name
    expected = statuses(build(folder, None, kl=kl, **flags))
    for together in (1, 3):
        monkeypatch.setattr(local_ray, "together", together)
        made = build(folder, PERIODIC, kl=kl, **flags)
        found = statuses(made)
        assert len(found) == len(expected) == made.max_steps == 4
        assert {one["metronome/periodic/parts"] for one in found} == ({4} if together == 1 else {2})
        for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            tolerance = 1e-5 if not step else 2e-3  # Adam makes the noise of gradients near zero a whole step
            compared = ["actor_grad_norm", "return", "rollout/reward_mean", "rollout/truncated_rate"]
            if "in the loss" not in name:  # whose metric OpenRLHF weighs by micro-batches
                compared.append("kl")
            for metric in compared:
                assert ours[metric] == pytest.approx(theirs[metric], rel=tolerance, abs=1e-5), (step, metric)
            for metric in ("rollout/reward_std", "rollout/response_length_mean", "rollout/num_samples", "seconds"):
                assert ours[metric] == pytest.approx(theirs[metric], rel=1e-5), (step, metric)
        assert made.engines[0].versions == [1, 2, 3, 4]
        assert "append" not in made.calls
        assert made.calls.count("metronome_step") == made.calls.count("broadcast_to_vllm") == 4


def test_length_penalties_change_the_gradient(folder):
    plain = statuses(build(folder, PERIODIC))
    shaped = statuses(build(folder, PERIODIC, **CASES["length penalties"]))
    assert abs(plain[0]["actor_grad_norm"] / shaped[0]["actor_grad_norm"] - 1) > 0.01


def test_the_status_of_a_period_has_what_openrlhf_logs_and_what_it_cost(folder):
    engine = Engine()
    status = statuses(build(folder, PERIODIC, engines=[engine]))[0]
    text, reward = status["generated_samples"]
    assert isinstance(text, str)
    assert 0 <= reward <= 1
    assert {"timing/generation", "timing/ppo_train", "timing/broadcast", "timing/step_total"} < set(status)
    assert 0 <= status["metronome/periodic/idle"] <= 1
    assert status["metronome/tpspd"] > 0
    assert status["metronome/periodic/rows"] == 16
    assert status["metronome/weights/changed"] == 1


# --- groups -------------------------------------------------------------------------------------------


def rollouts(made, sizes):
    made.samples_generator._dispatch_prompts_to_vllm = None
    engine, tokenizer = made.engines[0], made.tokenizer
    return [
        [
            made.samples_generator._process_response_into_experience(engine.response(f"{place}+1=", "", tokenizer, one))
            for one in range(size)
        ]
        for place, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("estimator", ["group_norm", "dr_grpo", "rloo"])
@pytest.mark.parametrize("micro", [1, 3, 4])
def test_advantages_of_equal_groups_are_openrlhfs(folder, estimator, micro):
    flags = {"algo__advantage__estimator": estimator, "rollout__micro_batch_size": micro}
    flags |= {"algo__kl__init_coef": 0.1}
    made = build(folder, PERIODIC, kl=True, **flags)
    groups = rollouts(made, (4, 4, 4))
    make = made.experience_maker.make_groups
    found = [row for group in [*make(groups[:1]), *make(groups[1:])] for row in group]
    stock = build(folder, None, kl=True, **flags)
    rows = [row for group in rollouts(made, (4, 4, 4)) for row in group]
    together = stock.experience_maker.make_experience_batch(rows)
    expected = [
        (batch.advantages[place][batch.action_mask[place].bool()], batch.info["group_reward_std"][place])
        for batch in together
        for place in range(len(batch.sequences))
    ]
    assert len(found) == len(expected) == 12
    for row, (advantages, deviation) in zip(found, expected, strict=True):
        assert torch.allclose(row.advantages[row.action_mask.bool()], advantages, atol=1e-6)
        assert torch.allclose(row.info["group_reward_std"], deviation, atol=1e-6)
        assert row.attention_mask.all()


def test_groups_of_any_size_are_compared_with_their_own_rows_only(folder):
    made = build(folder, PERIODIC, algo__advantage__estimator="dr_grpo")
    groups = made.experience_maker.make_groups(rollouts(made, (2, 5, 2, 3)))
    assert [len(group) for group in groups] == [2, 5, 2, 3]
    for place, group in enumerate(groups):
        rewards = [made.engines[0].score(f"{place}+1=", member) for member in range(len(group))]
        mean = sum(rewards) / len(rewards)
        for row, reward in zip(group, rewards, strict=True):
            trained = row.advantages[row.action_mask.bool()]
            assert torch.allclose(trained, torch.full_like(trained, reward - mean), atol=1e-6)
    assert made.args.rollout.n_samples_per_prompt == 4


def test_a_loss_that_takes_the_engines_log_probs_runs_no_forward_pass_of_the_actor(folder):
    made = build(folder, PERIODIC, kl=True, algo__kl__init_coef=0.1, algo__kl__use_loss=True)
    made.experience_maker.make_groups(rollouts(made, (4,)))
    assert made.calls == ["execute_batch"] * 1
    made.experience_maker.part = replace(made.part, block={**PERIODIC, "loss": "ppo"})
    (group,) = made.experience_maker.make_groups(rollouts(made, (4,)))
    assert made.calls == ["execute_batch"] * 1
    for row in group:
        mask = row.action_mask.bool()
        assert torch.equal(row.action_log_probs[mask], row.rollout_log_probs[mask])
        assert not row.action_log_probs[~mask].any()
        assert row.base_action_log_probs.shape == row.action_log_probs.shape
    made.args.algo.kl.use_loss = False  # a KL in the reward is one of the actor's own log-probs
    made.experience_maker.make_groups(rollouts(made, (4,)))
    assert made.calls == ["execute_batch"] * 2


def test_fewer_batches_than_ranks_go_through_the_models(folder):
    made = build(folder, PERIODIC, rollout__micro_batch_size=4)
    (expected,) = made.experience_maker.make_groups(rollouts(made, (4,)))
    made.experience_maker.actor_model_group = Group([made.worker, made.worker])
    (found,) = made.experience_maker.make_groups(rollouts(made, (4,)))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.action_log_probs, other.action_log_probs)
    rows = [row for group in rollouts(made, (4,)) for row in group]
    with pytest.raises(ValueError, match="Insufficient batch size"):
        RemoteExperienceMaker._dispatch_forward(
            made.experience_maker, made.experience_maker.actor_model_group, False, sequences=rows[:1]
        )


class Judge(BaseModelActor):
    """A reward model that knows what the engine would have said."""

    def __init__(self, made, score):
        self.strategy, self.tokenizer, self.score, self.asked = made.strategy, made.tokenizer, score, 0

    def forward(self, sequences, attention_mask, pad_sequence):
        self.asked += 1
        found = []
        for tokens, mask in zip(sequences, attention_mask, strict=True):
            found.append(self.score(self.tokenizer.decode(tokens[mask.bool()])))
        return torch.tensor(found)


def test_a_reward_model_judges_each_part_as_it_judges_the_whole_batch(folder):
    def score(text):
        return sum(map(ord, text)) % 97 / 97

    runs = []
    for block in (PERIODIC, None):
        engine = Engine()
        answer = engine.response
        engine.response = lambda *given, answer=answer: {**answer(*given), "reward": None, "scores": None}
        made = build(folder, block, engines=[engine], actor__max_norm=0.5)
        judge = Judge(made, score)
        made.experience_maker.reward_model_group = Group([judge])
        runs.append(statuses(made))
        assert judge.asked == 64
    for step, (one, other) in enumerate(zip(*runs, strict=True)):
        tolerance = 1e-5 if not step else 2e-3
        assert one["actor_grad_norm"] == pytest.approx(other["actor_grad_norm"], rel=tolerance)
        assert one["rollout/reward_mean"] == pytest.approx(other["rollout/reward_mean"], rel=1e-5)


# --- dynamic filtering --------------------------------------------------------------------------------


def scored(bad):
    """An engine whose prompts in ``bad`` have a score outside of the filter's range."""
    engine = Engine()
    drawn = engine.score
    engine.score = lambda prompt, member: 1.0 if prompt in bad else drawn(prompt, member)
    return engine


def prompts_of(folder, **flags):
    """The prompts in the order in which a run draws them."""
    made = build(folder, PERIODIC, **flags)
    made.fit()
    return [prompt for prompt, _ in made.engines[0].served]


def test_filtered_groups_are_replaced_and_the_pass_rate_is_openrlhfs(folder):
    order = prompts_of(folder)
    bad = {order[1], order[2], order[5]}
    expected = build(folder, None, engines=[scored(bad)], **FILTERED)
    theirs = statuses(expected)
    made = build(folder, PERIODIC, engines=[scored(bad)], **FILTERED)
    ours = statuses(made)
    assert [one["metronome/periodic/rows"] for one in ours] == [16, 16, 16, 4]
    assert [one["dynamic_filtering_pass_rate"] for one in ours] == [
        one["dynamic_filtering_pass_rate"] for one in theirs
    ]
    assert [one.states["total_consumed_prompts"] for one in made.logs] == [
        one.states["total_consumed_prompts"] for one in expected.logs
    ]
    assert [one["rollout/reward_mean"] for one in ours[:3]] == pytest.approx(
        [one["rollout/reward_mean"] for one in theirs[:3]]
    )
    assert sorted(prompt for prompt, _ in made.engines[0].served) == sorted(order)


def test_a_batch_cut_short_by_the_end_of_the_data_still_steps_by_the_rows_that_came(folder):
    order = prompts_of(folder, data__max_samples=6)
    made = build(folder, PERIODIC, engines=[scored(set(order[:3]))], data__max_samples=6, **FILTERED)
    found = statuses(made)
    assert [one["metronome/periodic/rows"] for one in found] == [12]
    assert found[0]["metronome/periodic/rescale"] == pytest.approx(16 * 12 / found[0]["metronome/periodic/tokens"])


def test_a_run_whose_filter_keeps_nothing_steps_nothing_and_ends(folder):
    engine = Engine()
    engine.score = lambda prompt, member: 1.0
    made = build(folder, PERIODIC, engines=[engine], **FILTERED)
    before = fingerprint(made.worker.actor.model.module)
    assert statuses(made) == []
    assert len(engine.served) == 16
    assert fingerprint(made.worker.actor.model.module) == before


# --- errors -------------------------------------------------------------------------------------------


def test_an_engines_error_ends_the_run_with_its_message_and_nothing_stepped(folder):
    engine = Engine()
    made = build(folder, PERIODIC, engines=[engine])
    before = fingerprint(made.worker.actor.model.module)
    take = engine.generate_responses

    def third(*arguments, **named):
        if len(engine.served) == 2:
            raise RuntimeError("the engine is out of memory")
        return take(*arguments, **named)

    engine.generate_responses = third
    with pytest.raises(RuntimeError, match="the engine is out of memory"):
        made.fit()
    assert fingerprint(made.worker.actor.model.module) == before
    assert "metronome_step" not in made.calls
    assert engine.versions == []


def test_an_error_in_a_part_ends_the_run_and_nothing_is_published(folder):
    made = build(folder, PERIODIC)
    step = made.worker.trainer.training_step

    def broken(*arguments, **named):
        if made.calls.count("metronome_accumulate") == 3:
            raise RuntimeError("no memory left for a backward pass")
        return step(*arguments, **named)

    made.worker.trainer.training_step = broken
    with pytest.raises(RuntimeError, match="no memory left"):
        made.fit()
    assert made.engines[0].versions == []
    assert made.worker.actor.model.global_steps == 0


@pytest.mark.parametrize("stamp", [1, -1])
def test_a_sample_of_another_version_ends_the_run(folder, stamp):
    engine = Engine()
    engine.stamp = stamp
    with pytest.raises(VersionMismatch, match=f"versions {stamp} to {stamp}, trained is 0"):
        build(folder, PERIODIC, engines=[engine]).fit()


def test_an_engine_that_the_new_weights_dont_reach_ends_the_run(folder):
    engines = [Engine(), Engine()]
    engines[1].deaf = True
    with pytest.raises(MetronomeError, match=r"engines \[1\] of 2"):
        build(folder, PERIODIC, engines=engines).fit()


def test_a_step_that_moves_no_weight_ends_the_run(folder):
    with pytest.raises(MetronomeError, match="changed no weight"):
        build(folder, PERIODIC, actor__adam__lr=1e-60).fit()


def test_weights_that_arent_numbers_end_the_run(folder):
    engine = Engine()
    engine.score = lambda prompt, member: float("nan")
    made = build(folder, PERIODIC, engines=[engine])
    with pytest.raises(MetronomeError, match="weights aren't numbers"):
        made.fit()
    assert engine.versions == []


def test_a_warm_up_from_rate_zero_may_leave_the_weights_as_they_are(folder):
    flags = {"actor__lr_scheduler": "linear", "actor__lr_warmup_ratio": 0.5}
    found = statuses(build(folder, PERIODIC, **flags))
    assert [one["metronome/weights/changed"] for one in found] == [0, 1, 1, 1]


@pytest.mark.parametrize("hook, block", [("loss", {"loss": "ppo"}), ("attention", {"attention": "shared_prompt"})])
def test_a_hook_that_is_set_and_isnt_called_ends_the_run(folder, hook, block):
    made = build(folder, PERIODIC)
    part = replace(made.part, block=block)
    if hook == "attention":
        part = replace(part, selection=replace(part.selection, attention=SimpleNamespace(shares_prompt=True)))
    made.part = part
    with pytest.raises(MetronomeError, match=f"--metronome.{hook} is set and wasn't called"):
        made.fit()
    assert made.engines[0].versions == []


# --- group controller ---------------------------------------------------------------------------------


class Scripted:
    """Chooses given sizes one after another and keeps what it is told."""

    name = "scripted"

    def __init__(self, sizes, budget):
        self.sizes, self.budget, self.place, self.told = sizes, budget, 0, []

    def size(self):
        return self.sizes[min(self.place, len(self.sizes) - 1)]

    def largest(self):
        return max(self.sizes)

    def prompts(self, rollout_budget, multiple=1):
        per = self.size() if self.budget == "fixed_rollouts" else self.largest()
        groups = rollout_budget // per
        return max(multiple, groups - groups % multiple)

    def observe(self, stats):
        self.told.append(stats)
        self.place += 1
        return {"place": float(self.place)}

    def explain(self):
        return "scripted"

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def scripted(made, sizes, budget):
    """Puts a scripted controller in ``made``."""
    controller = Scripted(sizes, budget)
    object.__setattr__(made.part.selection, "group_controller", controller)
    return controller


@pytest.mark.parametrize("source", ["periodic", "synchronous"])
@pytest.mark.parametrize("budget, prompts", [("fixed_rollouts", [4, 8, 4]), ("fixed_prompts", [4, 4, 4, 4])])
def test_g_changes_between_steps_and_every_batch_is_one_whole_step(folder, source, budget, prompts):
    block = {"rollout_source": source, **SAGC}
    made = build(folder, block, actor__max_norm=0.5)
    sizes = [4, 2, 4, 2]
    controller = scripted(made, sizes, budget)
    found = statuses(made)
    served = [size for _, size in made.engines[0].served]
    assert served == [size for size, count in zip(sizes, prompts, strict=False) for _ in range(count)]
    assert [one["metronome/group_controller/size"] for one in found] == sizes[: len(prompts)]
    assert [one["rollout/num_samples"] for one in found] == [p * g for p, g in zip(prompts, sizes, strict=False)]
    assert made.worker.actor.model.global_steps == len(prompts)
    assert [stats.step for stats in controller.told] == list(range(1, len(prompts) + 1))
    for stats, size, count in zip(controller.told, sizes, prompts, strict=False):
        assert [group.size for group in stats.groups] == [size] * count
        assert all(max(group.lengths) == 12 and any(group.truncated) for group in stats.groups)
        assert (stats.bubble is None) == (source == "synchronous")
    assert all(one["metronome/weights/changed"] for one in found)


def test_both_sources_take_the_same_steps_while_g_changes(folder):
    runs = []
    for source in ("periodic", "synchronous"):
        made = build(folder, {"rollout_source": source, **SAGC}, actor__max_norm=0.5)
        scripted(made, [4, 2, 4, 2], "fixed_prompts")
        runs.append(statuses(made))
    for one, other in zip(*runs, strict=True):
        assert one["actor_grad_norm"] == pytest.approx(other["actor_grad_norm"], rel=2e-3)


def test_two_optimiser_steps_a_batch_stay_two_when_g_changes(folder):
    made = build(folder, {"rollout_source": "synchronous", **SAGC}, train__batch_size=8)
    scripted(made, [4, 2], "fixed_prompts")
    made.fit()
    assert made.worker.actor.model.global_steps == 8


def test_rows_left_at_the_end_of_the_data_dont_half_fill_a_window(folder, capsys):
    made = build(folder, {"rollout_source": "synchronous", **SAGC}, data__max_samples=7, train__micro_batch_size=8)
    scripted(made, [4], "fixed_rollouts")
    found = statuses(made)
    assert [one["rollout/num_samples"] for one in found] == [16, 8]
    assert "leaves out 4 rows" in capsys.readouterr().out


def test_filtered_groups_are_told_and_evaluation_isnt(folder):
    order = prompts_of(folder, data__max_samples=6)
    engine = scored({order[0]})
    assets = workers.model(folder)
    flags = {"eval__dataset": str(assets.prompts), "eval__steps": 1, "eval__n_samples_per_prompt": 3}
    made = build(folder, {**PERIODIC, **SAGC}, engines=[engine], data__max_samples=6, **FILTERED, **flags)
    controller = scripted(made, [4], "fixed_rollouts")
    made.fit()
    assert [len(stats.groups) for stats in controller.told] == [5, 1]
    assert any(size == 3 for _, size in engine.served)
    assert all(group.size == 4 for stats in controller.told for group in stats.groups)


def test_the_learning_rates_schedule_counts_periods(folder):
    assert build(folder, PERIODIC, data__max_samples=18, train__num_episodes=2).max_steps == 10
    sixteen = build(folder, {**PERIODIC, "group_controller": "sagc", "sagc": {"sizes": [2, 4], "start": 2}})
    assert sixteen.max_steps == 2  # 16 prompts, 8 a period while G is 2


# --- checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["periodic", "synchronous"])
def test_a_resumed_run_goes_on_with_the_next_prompts_versions_and_controller(folder, source):
    block = {"rollout_source": source, **SAGC}

    def run(**flags):
        made = build(folder, block, ckpt__save_steps=2, **flags)
        controller = scripted(made, [4, 4, 2, 4], "fixed_prompts")
        return made, controller

    whole, _ = run()
    whole.fit()
    first, _ = run(ckpt__path=str(folder / "cut"))
    stop = first.train_step

    def interrupted(samples, step):
        if step == 2:
            raise KeyboardInterrupt
        return stop(samples, step)

    first.train_step = interrupted
    with pytest.raises(KeyboardInterrupt):
        first.fit()
    resumed, controller = run(ckpt__path=str(folder / "cut"), ckpt__load_enable=True)
    resumed.fit()
    assert [one.step for one in resumed.logs] == [3, 4]
    assert resumed.engines[0].versions == [2, 3, 4]
    assert resumed.engines[0].served == whole.engines[0].served[8:]
    assert controller.place == 4
    for one, other in zip(resumed.logs, whole.logs[2:], strict=True):
        assert one.status["actor_grad_norm"] == pytest.approx(other.status["actor_grad_norm"], rel=2e-3)
        assert one.states["total_consumed_prompts"] == other.states["total_consumed_prompts"]


def test_a_checkpoint_of_openrlhfs_own_doesnt_go_on_with_a_group_controller(folder):
    build(folder, None, ckpt__save_steps=2).fit()
    build(folder, PERIODIC, ckpt__load_enable=True).init_checkpoint_states()
    made = build(folder, {**PERIODIC, **SAGC}, ckpt__load_enable=True)
    with pytest.raises(ConfigurationError, match="no state of the group controller"):
        made.init_checkpoint_states()


def test_another_controller_than_the_checkpoints_starts_anew_and_says_so(folder, capsys):
    build(folder, {**PERIODIC, **SAGC}, ckpt__save_steps=2).fit()
    block = {**PERIODIC, "group_controller": "fixed", "fixed": {"size": 4}}
    build(folder, block, ckpt__load_enable=True).init_checkpoint_states()
    assert "group_controller fixed starts anew: the checkpoint is of sagc" in capsys.readouterr().out


# --- the wait -----------------------------------------------------------------------------------------


def test_silent_engines_are_waited_for_with_a_line_a_minute_and_given_up(folder, monkeypatch, capsys):
    from metronome.errors import WaitTimeout
    from metronome_openrlhf import samples

    made = build(folder, PERIODIC)
    arriving = Arriving(made.samples_generator, iter(made.prompts_dataloader), made.generate_kwargs)
    arriving.draw(2)
    monkeypatch.setattr(samples, "_SILENCE", 120.0)
    monkeypatch.setattr(local_ray, "wait", lambda refs, num_returns=1, timeout=None: ([], list(refs)))
    with pytest.raises(WaitTimeout, match="no group has finished"):
        arriving.part()
    assert capsys.readouterr().out.count("waits for 2 groups") == 2
