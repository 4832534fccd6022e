"""Gradients that add up over parts: OpenRLHF's own whole batch gives the same, on its real actor and DeepSpeed."""

import random

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need openrlhf (requirements/openrlhf.txt)")

import torch
import workers

from metronome.errors import ConfigurationError, MetronomeError
from metronome.periodic.normalizer import StreamingNormalizer
from metronome_openrlhf import update
from metronome_openrlhf.weights import fingerprint, finite

PERIODIC = {"rollout_source": "periodic"}
TOLERANCE = 2e-6
KL = {"algo__kl__use_loss": True, "algo__kl__init_coef": 0.1, "algo__kl__estimator": "k3"}
CASES = {
    "token-mean": {},
    "token-mean, KL and entropy": {**KL, "actor__entropy_coef": 0.01},
    "seq-mean-token-mean": {"actor__loss_agg_mode": "seq-mean-token-mean"},
    "token-mean, dual clip": {"actor__dual_clip": 3.0},
}
UNEQUAL = (2, 3, 5, 6)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return workers.model(tmp_path_factory.mktemp("assets")).model


def streamed(model, batch, parts=None, expected=16, kl=0.0, micro=2, finish=True, **flags):
    """A worker that got ``batch`` in ``parts`` (places of groups), each cut into micro-batches of ``micro`` rows."""
    worker = workers.policy(workers.arguments(PERIODIC, **flags), model)
    sums = {}
    for part in parts or [[place] for place in range(len(batch))]:
        rows = [row for place in part for row in batch[place]]
        cut = [workers.together(rows[at : at + micro]) for at in range(0, len(rows), micro)]
        for name, (total, weight) in worker.metronome_accumulate(cut, expected, kl).items():
            done, before = sums.get(name, (0.0, 0.0))
            sums[name] = done + total, before + weight
    status = {name: total / weight for name, (total, weight) in sums.items()}
    if finish:
        status |= worker.metronome_step(sum(map(len, batch)))
    return worker, status


def whole(model, batch, kl=0.0, **flags):
    worker = workers.stock(workers.arguments(**flags), model)
    return worker, workers.whole_step(worker, batch, kl)


def difference(one, other):
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("name", CASES)
def test_parts_in_any_order_give_openrlhfs_own_gradient_of_the_whole_batch(model, name):
    kl = 0.1 if "KL" in name else 0.0
    batch = workers.groups(UNEQUAL)
    reference, said = whole(model, batch, kl, **CASES[name])
    for parts in ([[0], [1], [2], [3]], [[3], [1], [0], [2]], [[2, 0], [3, 1]], [[1, 3, 0], [2]]):
        worker, status = streamed(model, batch, parts, kl=kl, **CASES[name])
        assert difference(workers.moments(worker), workers.moments(reference)) < TOLERANCE
        assert status["actor_grad_norm"] == pytest.approx(said["actor_grad_norm"], rel=TOLERANCE)


@pytest.mark.parametrize("name", CASES)
def test_without_the_rescaling_or_with_each_parts_own_normaliser_the_gradient_is_another(model, name, monkeypatch):
    kl = 0.1 if "KL" in name else 0.0
    batch = workers.groups(UNEQUAL)
    reference, _ = whole(model, batch, kl, **CASES[name])

    def own(self, rows):
        mask = torch.cat([one.action_mask.flatten() for one in self.given])
        sizes = [int((one.action_mask.sum(1) > 0).sum()) for one in self.given]
        return {
            "dp_size": 1,
            "batch_num_tokens": mask.sum().float() * 4,  # a mean of four parts' means
            "global_batch_size": torch.tensor(float(sum(sizes) * 4)),
        }

    def accumulate(self, micro_batches, *arguments):
        self.given = micro_batches
        return ours(self, micro_batches, *arguments)

    with monkeypatch.context() as patch:
        ours = update.MetronomeActorTrainer.accumulate
        patch.setattr(update.MetronomeActorTrainer, "accumulate", accumulate)
        patch.setattr(update.MetronomeActorTrainer, "_denominators", own)
        patch.setattr(StreamingNormalizer, "final_factor", lambda *_: 1.0)
        worker, _ = streamed(model, batch, kl=kl, **CASES[name])
        assert difference(workers.moments(worker), workers.moments(reference)) > 0.05
    if "seq" in name:  # whose factor is one when the rows came that were expected
        return
    monkeypatch.setattr(StreamingNormalizer, "final_factor", lambda *_: 1.0)
    worker, _ = streamed(model, batch, kl=kl, **CASES[name])
    assert difference(workers.moments(worker), workers.moments(reference)) > 0.05


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_clipping_acts_on_the_rescaled_gradient(model, mode):
    batch = workers.groups(UNEQUAL)
    flags = {"actor__loss_agg_mode": mode}
    free, _ = whole(model, batch, **flags)
    reference, said = whole(model, batch, **flags, actor__max_norm=0.1)
    assert said["actor_grad_norm"] > 0.2
    worker, status = streamed(model, batch, **flags, actor__max_norm=0.1)
    assert status["actor_grad_norm"] == pytest.approx(said["actor_grad_norm"], rel=TOLERANCE)
    assert difference(workers.moments(worker), workers.moments(reference)) < TOLERANCE
    assert difference(workers.moments(free), workers.moments(reference)) > 0.5


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_a_batch_of_which_less_came_than_expected_is_divided_by_what_came(model, mode):
    batch = workers.groups((4, 4))
    flags = {"actor__loss_agg_mode": mode}
    reference, said = whole(model, batch, **flags, train__batch_size=8)
    worker, status = streamed(model, batch, expected=16, **flags)
    assert difference(workers.moments(worker), workers.moments(reference)) < TOLERANCE
    assert status["actor_grad_norm"] == pytest.approx(said["actor_grad_norm"], rel=TOLERANCE)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_rows_without_a_trained_token_count_as_in_openrlhf(model, mode):
    batch = workers.groups((4, 4, 4, 4))
    batch[1][2].action_mask = torch.zeros_like(batch[1][2].action_mask)
    flags = {"actor__loss_agg_mode": mode}
    reference, _ = whole(model, batch, **flags)
    worker, status = streamed(model, batch, **flags)
    assert difference(workers.moments(worker), workers.moments(reference)) < TOLERANCE
    assert status["metronome/periodic/rows"] == 15


def test_bfloat16_weights_with_gradients_added_in_float32_agree_as_two_shuffles_of_openrlhf_do(model):
    batch = workers.groups(UNEQUAL)
    runs = []
    for seed in (1, 2):
        worker = workers.stock(workers.arguments(fp32=False), model)
        torch.manual_seed(seed)
        workers.whole_step(worker, batch)
        runs.append(workers.moments(worker))
    noise = difference(*runs)  # rows meet in other micro-batches, whose gradients are bfloat16
    worker = workers.policy(workers.arguments(PERIODIC, fp32=False), model)
    for group in batch:
        worker.metronome_accumulate([workers.together(group[at : at + 2]) for at in range(0, len(group), 2)], 16, 0.0)
    worker.metronome_step(16)
    assert difference(workers.moments(worker), runs[0]) < 3 * noise < 0.05


def test_two_periods_advance_the_learning_rate_once_each_and_agree_with_two_whole_batches(model):
    flags = {"actor__lr_scheduler": "linear", "actor__max_norm": 1.0}
    reference = workers.stock(workers.arguments(**flags), model, max_steps=4)
    worker = workers.policy(workers.arguments(PERIODIC, **flags), model, max_steps=4)
    for seed in range(2):
        batch = workers.groups(UNEQUAL, seed)
        said = workers.whole_step(reference, batch)
        for group in random.Random(seed).sample(batch, 4):
            worker.metronome_accumulate([workers.together([row]) for row in group], 16, 0.0)
        status = worker.metronome_step(16)
        assert status["actor_lr"] == pytest.approx(1e-3 * (1 - (seed + 1) / 4)) == said["actor_lr"]
        assert status["actor_grad_norm"] == pytest.approx(said["actor_grad_norm"], rel=1e-4)
        assert difference(workers.moments(worker), workers.moments(reference)) < 1e-4
    assert worker.actor.model.global_steps == reference.actor.model.global_steps == 2


# --- metrics ------------------------------------------------------------------------------------------


def test_metrics_of_parts_are_those_of_the_whole_batch(model):
    batch = workers.groups(UNEQUAL)
    flags = {**CASES["token-mean, KL and entropy"], "train__micro_batch_size": 16}
    _, said = whole(model, batch, 0.1, **flags)
    _, status = streamed(model, batch, kl=0.1, **flags)
    for name in ("policy_loss", "entropy_loss", "kl", "ppo_clip_ratio", "ppo_kl", "reward", "response_length"):
        assert status[name] == pytest.approx(said[name], rel=1e-4, abs=1e-6), name


def test_the_metric_of_a_loss_by_rows_is_the_mean_over_rows(model):
    batch = workers.groups(UNEQUAL)
    flags = {"actor__loss_agg_mode": "seq-mean-token-mean", "train__micro_batch_size": 16}
    _, said = whole(model, batch, **flags)
    _, status = streamed(model, batch, **flags)
    assert status["policy_loss"] == pytest.approx(said["policy_loss"], rel=1e-4)


# --- masked copies ------------------------------------------------------------------------------------


def test_masked_copies_change_neither_gradient_nor_metrics_nor_counts(model):
    batch = workers.groups((4, 4))
    plain, status = streamed(model, batch, expected=8)
    worker = workers.policy(workers.arguments(PERIODIC), model)
    fill = workers.together(batch[0][:1])
    fill.action_mask = torch.zeros_like(fill.action_mask)
    sums = {}
    for group in batch:
        cut = [workers.together(group[:2]), workers.together(group[2:]), workers.together([fill])]
        for name, (total, weight) in worker.metronome_accumulate(cut, 8, 0.0, 1).items():
            done, before = sums.get(name, (0.0, 0.0))
            sums[name] = done + total, before + weight
    filled = worker.metronome_step(8)
    assert difference(workers.moments(worker), workers.moments(plain)) < TOLERANCE
    assert filled["metronome/periodic/rows"] == status["metronome/periodic/rows"] == 8
    for name, (total, weight) in sums.items():
        assert total / weight == pytest.approx(status[name], rel=1e-5, abs=1e-7), name


def test_a_batch_without_a_trained_token_steps_nothing(model):
    batch = workers.groups((2,))
    for row in batch[0]:
        row.action_mask = torch.zeros_like(row.action_mask)
    worker = workers.policy(workers.arguments(PERIODIC), model)
    before = fingerprint(worker.actor.model.module)
    worker.metronome_accumulate([workers.together(batch[0])], 16, 0.0)
    status = worker.metronome_step(2)
    assert fingerprint(worker.actor.model.module) == before
    assert status["metronome/weights/changed"] == status["actor_grad_norm"] == 0
    assert worker.actor.model.global_steps == 0


# --- errors -------------------------------------------------------------------------------------------


def test_an_error_in_a_part_leaves_nothing_to_step_with(model):
    batch = workers.groups((2, 2))
    worker = workers.policy(workers.arguments(PERIODIC), model)
    before = fingerprint(worker.actor.model.module)
    worker.metronome_accumulate([workers.together(batch[0])], 16, 0.0)
    broken = workers.together(batch[1])
    broken.advantages = broken.advantages[:, :1].repeat(1, 3)
    with pytest.raises(RuntimeError, match="size"):
        worker.metronome_accumulate([broken], 16, 0.0)
    with pytest.raises(MetronomeError, match="no whole gradient"):
        worker.metronome_step(4)
    with pytest.raises(MetronomeError, match="interrupted part"):
        worker.metronome_accumulate([workers.together(batch[0])], 16, 0.0)
    assert fingerprint(worker.actor.model.module) == before


def test_a_step_with_rows_lost_or_a_part_that_expects_another_batch_is_an_error(model):
    batch = workers.groups((2, 2))
    worker = workers.policy(workers.arguments(PERIODIC), model)
    with pytest.raises(MetronomeError, match="no whole gradient"):
        worker.metronome_step(0)
    worker.metronome_accumulate([workers.together(batch[0])], 16, 0.0)
    with pytest.raises(MetronomeError, match="same number of rows"):
        worker.metronome_accumulate([workers.together(batch[1])], 8, 0.0)
    with pytest.raises(MetronomeError, match="2 accumulated, 4 named"):
        worker.metronome_step(4)


def test_openrlhfs_own_update_is_refused_in_periodic_mode(model):
    worker = workers.policy(workers.arguments(PERIODIC), model)
    with pytest.raises(MetronomeError, match="periodic mode trains by parts"):
        worker.fit(0.0)


def test_dropout_in_the_model_is_refused_in_periodic_mode(model, monkeypatch):
    monkeypatch.setattr(update, "_dropout", lambda module: 0.1)
    with pytest.raises(ConfigurationError, match="dropout"):
        workers.policy(workers.arguments(PERIODIC), model)
    relaxed = {**PERIODIC, "periodic": {"strict": False}}
    workers.policy(workers.arguments(relaxed), model)


def test_dropout_is_read_off_modules_and_attention():
    assert update._dropout(torch.nn.Sequential(torch.nn.Dropout(0.2), torch.nn.Linear(1, 1))) == 0.2
    attention = torch.nn.Linear(1, 1)
    attention.attention_dropout = 0.3
    assert update._dropout(torch.nn.Sequential(attention)) == 0.3
    assert update._dropout(torch.nn.Linear(1, 1)) == 0.0


# --- OpenRLHF's own path with another G ---------------------------------------------------------------


def test_a_window_of_another_size_keeps_one_whole_step_a_batch(model):
    block = {"group_controller": "fixed", "fixed": {"size": 4}}
    worker = workers.policy(workers.arguments(block), model)
    reference = workers.stock(workers.arguments(train__batch_size=8), model)
    batch = workers.groups((4, 4))
    worker.metronome_window(8)
    status, said = workers.whole_step(worker, batch), workers.whole_step(reference, batch)
    assert worker.actor.model.global_steps == 1
    assert difference(workers.moments(worker), workers.moments(reference)) < TOLERANCE
    assert status["actor_grad_norm"] == pytest.approx(said["actor_grad_norm"], rel=TOLERANCE)
    assert status["metronome/weights/changed"] == 1
    assert status["metronome/weights/lr"] == pytest.approx(1e-3)


def test_without_setting_the_window_a_smaller_batch_half_fills_it_and_steps_nothing(model):
    worker = workers.policy(workers.arguments({"group_controller": "fixed", "fixed": {"size": 4}}), model)
    status = workers.whole_step(worker, workers.groups((4, 4)))
    assert worker.actor.model.global_steps == 0
    assert status["metronome/weights/changed"] == 0


def test_windows_may_change_between_batches_and_not_within_one(model):
    block = {"group_controller": "fixed", "fixed": {"size": 4}}
    worker = workers.policy(workers.arguments(block), model)
    for rows, batch in ((16, (4, 4, 4, 4)), (8, (4, 4)), (16, (4, 4, 4, 4)), (12, (4, 4, 4))):
        worker.metronome_window(rows)
        before = worker.actor.model.global_steps
        workers.whole_step(worker, workers.groups(batch))
        assert worker.actor.model.global_steps == before + 1
    workers.whole_step(worker, workers.groups((4,)))
    with pytest.raises(MetronomeError, match="2 of 6 micro-batches"):
        worker.metronome_window(16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_changed_weight_is_seen_and_one_that_isnt_a_number(dtype):
    layer = torch.nn.Linear(50, 50).to(dtype)
    before = fingerprint(layer)
    assert fingerprint(layer) == before
    assert finite(layer)
    with torch.no_grad():
        layer.weight[7, 7] = torch.nextafter(layer.weight[7, 7], torch.tensor(9.0, dtype=dtype))
    assert fingerprint(layer) != before
    with torch.no_grad():
        layer.weight[7, 7] = float("inf")
    assert not finite(layer)
