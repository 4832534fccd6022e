"""Every prompt once: a bounded run of verl's trainer over checkpoints, epochs, stale and filtered groups."""

import os
import pickle
from collections import Counter

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")
pytest.importorskip("transfer_queue", reason="verl's V1 trainer needs TransferQueue (requirements/verl.txt)")

from queue_room import BLOCK, begin, drawn, maker, step, trained_once
from test_trainer import SAGC
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from metronome.errors import ConfigurationError
from metronome_verl.bounded import BoundedTrainer

QUEUE = "transfer_queue"


@pytest.fixture
def bounded(monkeypatch, tmp_path):
    return maker(monkeypatch, tmp_path)


# --- prompts in flight ----------------------------------------------------------------------------------


def test_a_resumed_bounded_run_trains_each_prompt_once_over_epochs(bounded):
    first = begin(bounded())
    for number in range(4):
        step(first, save=number == 3, more=1)  # of the two prompts in flight one is finished, the other is running
    assert {tag["status"] for tag in first.queue.tags.values() if tag.get("is_prompt")} == {"finished", "running"}
    resumed = begin(bounded())
    for number in range(5):
        step(resumed, save=number == 4)
    third = begin(bounded())
    for _ in range(3):
        step(third)
    found = trained_once(first.trained, resumed.trained, third.trained)
    assert len(found) == 24
    left = [third.queue.rows[uid]["index"] for uid in third.queue.prompts]
    assert Counter(found + left) == Counter(drawn(bounded, 26))  # 7 rows: three epochs, and the beginning of another
    assert all(count == 1 for count in resumed.agent_loop_manager.sent.values())


def test_without_the_queue_that_verl_saves_the_prompts_in_flight_are_lost(bounded, monkeypatch, tmp_path):
    first = begin(bounded(rows=30))
    step(first)
    step(first, save=True)
    os.rename(tmp_path / "global_step_2" / QUEUE, tmp_path / "gone")
    with pytest.raises(ConfigurationError, match="2 prompts were in flight at the checkpoint"):
        bounded(rows=30)._load_checkpoint()
    monkeypatch.setattr(BoundedTrainer, "_load_checkpoint", PPOTrainer._load_checkpoint)  # verl alone says nothing
    resumed = begin(bounded(rows=30))
    step(resumed)
    step(resumed)
    found = set(trained_once(first.trained, resumed.trained))
    left = {resumed.queue.rows[uid]["index"] for uid in resumed.queue.prompts}
    assert len(set(drawn(bounded, 12, rows=30)) - found - left) == 2


def test_a_checkpoint_whose_storage_backend_saves_no_rows_is_told_and_refused(bounded, tmp_path, capsys):
    made = begin(bounded())
    step(made, save=True)
    assert "can't be resumed" not in capsys.readouterr().out
    made.queue.saves_rows = False
    step(made, save=True)
    assert "global_step_2 can't be resumed from: the queue's storage backend" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match=r"2 prompts were in flight[^$]*SimpleStorage"):
        bounded()._load_checkpoint()


def test_a_queue_with_other_prompts_than_at_the_checkpoint_is_refused(bounded, tmp_path):
    made = begin(bounded())
    step(made, save=True)
    file = tmp_path / "global_step_1" / QUEUE / "all.pkl"
    tags, rows = pickle.loads(file.read_bytes())
    tags.pop(next(key for key, tag in tags.items() if tag.get("is_prompt")))
    file.write_bytes(pickle.dumps((tags, rows)))
    with pytest.raises(ConfigurationError, match="1 missing, 0 unknown, of 2"):
        bounded()._load_checkpoint()


def test_rows_that_were_trained_before_the_checkpoint_are_gone_after_it(bounded, monkeypatch):
    made = begin(bounded())
    step(made, save=True, more=2)
    resumed = bounded()
    resumed._load_checkpoint()
    assert set(resumed.queue.tags) == set(made.queue.tags)  # prompts in flight with their rows, and nothing else
    monkeypatch.setattr(BoundedTrainer, "_load_checkpoint", PPOTrainer._load_checkpoint)
    theirs = bounded()
    theirs._load_checkpoint()
    assert len(theirs.queue.tags) == len(made.queue.tags) + 4  # two groups of two, in verl's queue for ever


def test_a_prompt_that_is_sent_again_after_a_resume_keeps_the_g_that_it_was_drawn_with(bounded):
    block = BLOCK | SAGC
    made = bounded(block)
    made.config.actor_rollout_ref.rollout.n = 4
    step(begin(made), save=True)
    resumed = bounded(block)
    resumed.config.actor_rollout_ref.rollout.n = 2
    begin(resumed)
    assert [size for _, _, size, _ in resumed.agent_loop_manager.running] == [4, 4]
    assert resumed.config.actor_rollout_ref.rollout.n == made.controller.size()  # for prompts drawn before a step
    with pytest.raises(ConfigurationError, match="prompts in flight carry their G"):
        bounded()._load_checkpoint()


# --- groups that are replaced ---------------------------------------------------------------------------


def stale(make, block=BLOCK, theirs=False):
    """A run over four steps, resumed after the second: two batches are in flight, and finished while step 1 trains."""

    def made():
        new = make(block, rows=30, warm_up=2)
        if theirs:
            new.replay_buffer.refill_fn = new._add_prompts_to_generate
        return begin(new)

    first = made()
    found = [step(first, more=4), step(first, save=True)]
    resumed = made()
    found += [step(resumed), step(resumed)]
    evicted = sum(int(metrics.get("training/off_policy/evicted_samples", 0)) for metrics in found)
    left = [resumed.queue.rows[uid]["index"] for uid in resumed.queue.prompts]
    return first, resumed, evicted, trained_once(first.trained, resumed.trained) + left


def test_a_resumed_run_stays_within_the_bound_and_generates_the_prompts_of_stale_groups_again(bounded):
    first, resumed, evicted, found = stale(bounded)
    assert max(first.staleness + resumed.staleness) == 1
    again = {uid for uid, _ in resumed.trained if resumed.agent_loop_manager.sent[uid]} & first.queue.prompts
    assert len(again) == evicted == 2
    assert Counter(found) == Counter(drawn(bounded, 12, rows=30))  # every one that was drawn, and no more


def test_the_wider_bound_that_would_let_them_pass(bounded):
    first, resumed, evicted, _ = stale(bounded, BLOCK | {"bounded": {"max_staleness": 2}})
    assert (max(first.staleness + resumed.staleness), evicted) == (2, 0)


def test_verl_s_own_refill_would_lose_the_prompts_of_stale_groups(bounded):
    *_, evicted, found = stale(bounded, theirs=True)
    assert len(set(drawn(bounded, 12 + evicted, rows=30)) - set(found)) == evicted > 0


def test_groups_that_dynamic_sampling_filters_count_as_used(bounded):
    made = bounded(rows=30, filtered=True, shuffle=False)
    made.agent_loop_manager.rewards[1] = [1.0] * 4
    begin(made)
    metrics = [step(made), step(made, save=True)]
    assert [found.get("training/filter_groups/evicted_samples", 0) for found in metrics] == [1, 0]
    resumed = bounded(rows=30, filtered=True, shuffle=False)
    step(begin(resumed))
    assert trained_once(made.trained, resumed.trained) == [0, 2, 3, 4, 5, 6]
    assert set(made.agent_loop_manager.sent.values()) == {1}
