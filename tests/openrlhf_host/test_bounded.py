"""Bounded staleness on OpenRLHF's asynchronous trainer: each prompt trained once, none too old, in whole windows."""

from collections import Counter
from types import SimpleNamespace

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need openrlhf (requirements/openrlhf.txt)")

import openrlhf_async
import torch
import workers
from openrlhf.trainer.ray import ppo_actor

from metronome.contracts import Verdict
from metronome.errors import ConfigurationError, MetronomeError, VersionMismatch
from metronome.periodic.sources import Bounded
from metronome_openrlhf import state
from metronome_openrlhf.bounded import MetronomeLearner, versions_of
from metronome_openrlhf.config import part_of

GROUP = 4


@pytest.fixture
def folder(tmp_path, monkeypatch):
    openrlhf_async.install(monkeypatch.setattr)
    yield tmp_path
    openrlhf_async.stop()


def staleness(bound, **block):
    return {"bounded": {"max_staleness": bound}, **block}


def run(folder, block, **flags):
    made = openrlhf_async.build(folder, block, **flags)
    made.fit()
    made.steps = made.learner.logs
    made.trained = made.learner.trained
    return made


def prompts(made):
    """How often each prompt was trained, all of its rows together."""
    counts = Counter(prompt for rows in made.trained for prompt, _ in rows)
    assert all(count % GROUP == 0 for count in counts.values())
    return Counter({prompt: count // GROUP for prompt, count in counts.items()})


def ages(made):
    """Of each step the ages of its groups, oldest last."""
    found = []
    for step, rows in enumerate(made.trained):
        found.append(sorted(step - min(versions) for _, versions in rows[::GROUP]))
    return found


# --- the bound ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("queue", [1, 2, 3])
def test_staleness_comes_as_far_as_the_queue_is_long_and_no_further(folder, queue):
    made = run(folder, staleness(queue))
    assert [max(step) for step in ages(made)] == [min(step, queue) for step in range(6)]
    assert [one.status["metronome/bounded/staleness_max"] for one in made.steps] == [max(step) for step in ages(made)]
    assert {one.status["metronome/bounded/dropped_groups"] for one in made.steps} == {0}
    assert set(prompts(made).values()) == {1}
    assert len(prompts(made)) == 24
    assert made.engines[0].versions == [1, 2, 3, 4, 5, 6]


def test_behind_a_fast_trainer_nothing_is_stale(folder):
    made = run(folder, staleness(2), pace="fast")
    assert {age for step in ages(made) for age in step} == {0}


@pytest.mark.parametrize("bound", [1, 2])
def test_groups_above_the_bound_are_generated_again_and_every_prompt_is_trained_once(folder, bound):
    made = run(folder, staleness(bound), train__async_queue_size=4)
    assert max(age for step in ages(made) for age in step) == bound
    assert {len(rows) for rows in made.trained} == {16}
    assert set(prompts(made).values()) == {1}
    assert len(prompts(made)) == 24
    dropped = made.steps[-1].status["metronome/bounded/dropped_groups_total"]
    assert dropped == len(made.engines[0].served) - 24 > 0
    assert sum(one.status["metronome/bounded/dropped_groups"] for one in made.steps) == dropped
    assert not made.learner.waiting
    assert not made.learner.away


def test_without_the_verdict_older_groups_would_be_trained(folder, monkeypatch):
    monkeypatch.setattr(Bounded, "verdict", lambda *_: Verdict.TRAIN)
    made = run(folder, staleness(1), train__async_queue_size=4)
    assert max(age for step in ages(made) for age in step) == 4


def test_without_what_came_back_prompts_would_be_missing(folder, monkeypatch):
    def lost(self, *_):
        self.away.clear()

    monkeypatch.setattr(MetronomeLearner, "_send_back", lost)
    made = run(folder, staleness(1), train__async_queue_size=4)
    assert len(prompts(made)) < 24


def test_a_token_of_any_version_counts_for_its_group():
    batch = workers.groups((2,), version=3)[0]
    batch[0].versions[0, -1] = 1
    assert versions_of(batch) == [1, 3]
    batch[1].action_mask[0, -1] = 0
    batch[1].versions[0, -1] = 7  # not trained
    assert versions_of(batch) == [1, 3]
    batch[1].versions = None
    assert versions_of(batch) == [-1, 1, 3]


def test_a_group_of_unknown_version_stops_the_run(folder):
    made = openrlhf_async.build(folder, staleness(2))
    made.engines[0].stamp = -1
    with pytest.raises(VersionMismatch):
        made.fit()


# --- whole windows --------------------------------------------------------------------------------------


def test_episodes_that_divide_into_no_whole_batches_fill_the_next_ones(folder):
    made = run(folder, staleness(2), data__max_samples=18, train__num_episodes=2)
    assert [len(rows) for rows in made.trained] == [16] * 9
    assert set(prompts(made).values()) == {2}
    assert len(prompts(made)) == 18


@pytest.mark.parametrize("rows, left", [(8, 0), (16, 2)])
def test_what_is_left_at_the_end_is_trained_in_whole_windows_and_the_rest_is_told(folder, capsys, rows, left):
    made = run(folder, staleness(2), data__max_samples=18, train__batch_size=rows)
    assert [len(one) for one in made.trained] == [16] * 4 + ([8] if not left else [])
    assert len(prompts(made)) == 18 - left
    assert ("leaves out 8 rows at the end of the data" in capsys.readouterr().out) is bool(left)
    assert made.worker.actor.model.micro_steps % made.worker.actor.model.gradient_accumulation_steps() == 0


def test_dynamic_filtering_replaces_a_group_and_what_is_filtered_at_the_end_leaves_no_half_window(folder):
    made = openrlhf_async.build(
        folder, staleness(1), algo__dynamic_filtering_enable=True, algo__dynamic_filtering_range=[0.01, 0.99]
    )
    score = made.engines[0].score
    made.engines[0].score = lambda prompt, member: 0.0 if prompt.startswith("1+") else score(prompt, member)
    made.fit()
    trained = Counter(prompt for rows in made.learner.trained for prompt, _ in rows)
    assert {len(rows) for rows in made.learner.trained} == {16}
    assert not [prompt for prompt in trained if prompt.startswith("1+")]
    assert set(trained.values()) == {GROUP}


# --- publication ----------------------------------------------------------------------------------------

PUBLICATIONS = {
    "finish": ["set_version {}"],
    "resume": ["pause", "set_version {}", "resume"],
    "abort": ["pause", "set_version {}", "abort", "resume"],
}


@pytest.mark.parametrize("in_flight", PUBLICATIONS)
def test_engines_learn_their_version_before_they_go_on(folder, in_flight):
    made = run(folder, staleness(1, in_flight=in_flight), data__max_samples=8)
    assert made.log == [line.format(version) for version in (1, 2) for line in PUBLICATIONS[in_flight]]
    assert made.generator._partial_rollout is (in_flight != "finish")


def test_engines_go_on_after_a_publication_that_failed(folder):
    made = openrlhf_async.build(folder, staleness(1, in_flight="resume"))
    made.engines[0].deaf = True
    with pytest.raises(MetronomeError, match="didn't reach the rollout engines"):
        made.fit()
    assert made.log == ["pause", "set_version 1", "resume"]
    made.learner.vllm_lock.acquire.remote()  # isn't held


def test_an_engines_error_ends_the_run(folder):
    made = openrlhf_async.build(folder, staleness(1))
    made.engines[0].error = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        made.fit()


# --- the losses and OpenRLHF's evaluation ---------------------------------------------------------------


def test_a3po_sees_its_samples_ages_and_leaves_their_policy_from_two_on(folder):
    made = run(folder, staleness(3, loss="a3po"))
    told = [
        {name: one.status[f"metronome/loss/{name}"] for name in ("staleness_max", "off_behavior")} for one in made.steps
    ]
    assert [one["staleness_max"] for one in told] == [0, 1, 2, 3, 3, 3]
    assert "samples up to 3 versions old" in made.learner.metronome_seen().told("a3po")
    assert [one["off_behavior"] > 0.5 for one in told] == [False, False, True, True, True, True]
    assert all(one.status["metronome/loss/version_unknown"] == 0 for one in made.steps)


def test_an_evaluation_takes_a_place_in_the_queue_and_gives_it_back(folder):
    given = {"eval__dataset": str(folder / "prompts.jsonl"), "eval__steps": 2, "eval__n_samples_per_prompt": 2}
    workers.model(folder)
    made = openrlhf_async.build(folder, staleness(1), **given)
    seen = []
    made.learner.tensorboard_logger = SimpleNamespace(
        log_eval=lambda step, found: seen.append((step, found["eval_num_samples"])),
        log_train=lambda *_: None,
        close=lambda: seen.append("closed"),
    )
    made.fit()
    assert [step for step, _ in seen[:-1]] == [2, 4]
    assert {count for _, count in seen[:-1]} == {48}
    assert seen[-1] == "closed"
    assert len({prompt for rows in made.learner.trained for prompt, _ in rows}) == 24


# --- checkpoints ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bound, queue", [(2, 2), (1, 4)])
def test_from_any_checkpoint_each_prompt_is_trained_once_and_the_bound_is_kept(folder, bound, queue):
    flags = {"train__async_queue_size": queue, "data__max_samples": 24}
    whole = run(folder / "whole", staleness(bound), **flags)
    for number, saved in enumerate(whole.steps[:-1], 1):
        trained = list(whole.trained[:number])
        made = run(folder / str(number), staleness(bound), states=saved.states, **flags)
        assert made.engines[0].versions[0] == number == made.steps[0].step - 1
        seen = Counter(prompt for rows in [*trained, *made.trained] for prompt, _ in rows)
        assert set(seen.values()) == {GROUP}
        assert len(seen) == 24
        for step, rows in enumerate(made.trained, number):
            assert max(step - min(versions) for _, versions in rows) <= bound
    if queue > bound:  # a checkpoint without what was taken and not trained lacks prompts
        saved = next(one for one in whole.steps if one.states["metronome"]["again"])
        saved.states["metronome"]["again"] = []
        made = run(folder / "less", staleness(bound), states=saved.states, **flags)
        seen = {prompt for rows in [*whole.trained[: saved.step], *made.trained] for prompt, _ in rows}
        assert len(seen) < 24


def test_openrlhfs_own_checkpoint_is_resumed(folder):
    whole = run(folder / "whole", staleness(1))
    states = whole.steps[2].states
    del states["metronome"]
    made = run(folder / "rest", staleness(1), states=states)
    assert len({prompt for rows in [*whole.trained[:3], *made.trained] for prompt, _ in rows}) == 24


def test_the_state_is_saved_and_loaded_by_openrlhfs_own_checkpoints(folder, monkeypatch):
    saved = []
    monkeypatch.setattr(
        ppo_actor.PolicyModelActor.__ray_metadata__.modified_class,
        "save_checkpoint",
        lambda self, tag, client_states=None, **_: saved.append((tag, client_states)),
    )
    run(folder, staleness(1), train__async_queue_size=4, ckpt__save_steps=2)
    assert [tag for tag, _ in saved] == ["global_step2", "global_step4", "global_step6"]
    for tag, states in saved:
        assert states["global_step"] == int(tag[-1])
        assert states["metronome"]["states"]["rollout_source"] == {"name": "bounded", "max_staleness": 1}
        torch.save(states, folder / "states")  # as DeepSpeed does
        assert torch.load(folder / "states", weights_only=False) == states


def test_another_source_would_lose_prompts_that_aren_t_trained_and_is_refused():
    part = _part({"rollout_source": "synchronous"})
    left = {**state.saved(_part({"rollout_source": "bounded"})), "again": [("1+1", "2", None)]}
    with pytest.raises(ConfigurationError, match="1 prompts of bounded, now synchronous"):
        state.restored(part, left)
    state.restored(part, {**left, "again": []})


def _part(block):
    told = {"block": block, "in_flight": "finish", "device": "cpu"}
    return part_of(SimpleNamespace(metronome=told, train=SimpleNamespace(seed=1)))
