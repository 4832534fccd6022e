"""Our losses inside verl's real worker: verl's own loss where they must agree, versions per token where they don't."""

import math

import pytest

pytest.importorskip("verl")

import torch
import workers
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics

from metronome.a3po.loss import A3po
from metronome.a3po.metrics import Meter
from metronome.a3po.options import A3poOptions, PpoOptions
from metronome.a3po.ppo import Ppo
from metronome.contracts import TokenLoss
from metronome.errors import ConfigurationError, MetronomeError, PluginError, VersionMismatch
from metronome_verl.loss import HostLoss, policy_loss

EVERYTHING = {"entropy_coeff": 0.05, "use_kl_loss": True, "kl_loss_coef": 0.1, "loss_scale_factor": 16}
MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@pytest.fixture(scope="module")
def worker():
    torch.set_num_threads(1)
    return workers.worker()


@pytest.fixture
def samples():
    return workers.Samples()


def recording(loss):
    """The loss, which keeps the batches that it gets in ``batches``."""

    def call(self, batch):
        self.batches.append(batch)
        return type(loss).__call__(self, batch)

    made = type("Recording", (type(loss),), {"__call__": call})(loss.options)
    made.batches = []
    return made


def scored(data, offset=0.0):
    """A batch with denominators, and model output whose log-probs are leaves."""
    for key, value in {"dp_size": 1, "batch_num_tokens": int(data["loss_mask"].sum())}.items():
        tu.assign_non_tensor_data(data, key, value)
    lengths = data["input_ids"].offsets()
    draw = torch.Generator().manual_seed(5)
    log_probs = (-math.log(97) + offset + 0.3 * torch.randn(int(lengths[-1]), generator=draw)).requires_grad_()
    entropy = torch.rand(int(lengths[-1]), generator=draw).requires_grad_()

    def nested(values):
        return torch.nested.nested_tensor_from_jagged(values, lengths)

    return {"log_probs": nested(log_probs), "entropy": nested(entropy)}, (log_probs, entropy)


def both(samples, config, ours, data=None, **options):
    """(loss, gradients) of verl's ppo_loss and of ours on the same data."""
    results = []
    for fn in (workers.stock_loss(config), lambda **given: policy_loss(config, **given, **options, loss=ours)):
        batch = samples.batch() if data is None else data()
        output, leaves = scored(batch)
        loss, metrics = fn(model_output=output, data=batch, dp_group=None)
        results.append((loss.detach(), torch.autograd.grad(loss, leaves), metrics))
    return results


@pytest.mark.parametrize("mode", MODES)
def test_ppo_is_verl_s_vanilla_loss_with_clip_entropy_and_kl(samples, mode):
    config = workers.actor_config(loss_agg_mode=mode, clip_ratio_low=0.1, clip_ratio_high=0.15, **EVERYTHING)
    ours = Ppo(PpoOptions(clip_low=0.1, clip_high=0.15, dual_clip=3.0, anchor="old"))
    meter = Meter()
    (theirs, their_grads, their_metrics), (loss, grads, metrics) = both(
        samples, config, ours, training_version=0, meter=meter, bypassed=False
    )
    torch.testing.assert_close(loss, theirs, rtol=1e-6, atol=1e-7)
    for grad, wanted in zip(grads, their_grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-5, atol=1e-8)
    for key in ("actor/pg_loss", "actor/entropy_loss", "kl_loss"):
        assert metrics[key].aggregate() == pytest.approx(their_metrics[key].aggregate(), rel=1e-6)
        assert metrics[key].aggregation is their_metrics[key].aggregation
    for key, name in (("clipped", "pg_clipfrac"), ("dual_clipped", "pg_clipfrac_lower")):
        fraction = meter.result()[key]
        assert fraction == pytest.approx(their_metrics[f"actor/{name}"].aggregate(), abs=1e-6)
        assert 0.0 < fraction < 0.9  # both clips act in these samples


def test_another_clip_is_another_loss(samples):
    config = workers.actor_config(clip_ratio_low=0.1, clip_ratio_high=0.15, **EVERYTHING)
    (theirs, *_), (loss, *_) = both(samples, config, Ppo(), training_version=0, meter=Meter(), bypassed=False)
    assert abs(float(loss - theirs)) > 1e-3


def test_the_behaviour_anchor_is_verl_s_loss_in_bypass_mode(samples):
    config = workers.actor_config(loss_agg_mode="token-mean", **EVERYTHING)
    samples.old = samples.behavior  # what verl's bypass mode does
    ours = Ppo(PpoOptions(anchor="behavior", dual_clip=3.0))
    (theirs, their_grads, _), (loss, grads, _) = both(samples, config, ours, training_version=0, meter=Meter())
    torch.testing.assert_close(loss, theirs, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(grads[0], their_grads[0], rtol=1e-5, atol=1e-8)


def test_verl_s_importance_weights_apply_to_ppo_as_to_its_own_loss_and_never_to_a3po(samples):
    config = workers.actor_config(**EVERYTHING)

    def weighed():
        data = samples.batch()
        draw = torch.Generator().manual_seed(9)
        data["rollout_is_weights"] = torch.nested.as_nested_tensor(
            [torch.rand(len(row), generator=draw) for row in samples.responses], layout=torch.jagged
        )
        return data

    ours = Ppo(PpoOptions(dual_clip=3.0))
    options = {"training_version": 0, "meter": Meter(), "bypassed": False}
    (theirs, *_), (loss, *_) = both(samples, config, ours, weighed, **options)
    torch.testing.assert_close(loss, theirs, rtol=1e-6, atol=1e-7)
    (_, *_), (plain, *_) = both(samples, config, ours, **options)
    assert abs(float(plain - loss)) > 1e-3
    data = weighed()
    output, _ = scored(data)
    with pytest.raises(ConfigurationError, match=r"rollout_correction\.rollout_is"):
        policy_loss(config, output, data, loss=A3po(), training_version=0, meter=Meter())


def test_a_response_over_three_versions_has_three_stalenesses(samples):
    samples.responses[6], samples.masks[6] = samples.responses[6][:6], torch.tensor([1, 1, 0, 1, 1, 1])
    for field in (samples.advantages, samples.behavior, samples.old, samples.reference):
        field[6] = field[6][:6]
    samples.extra_fields[6] = {"version_spans": [[2, 1], [4, 2], [5, 2]]}
    ours, meter = recording(A3po()), Meter()
    data = samples.batch([6])
    output, _ = scored(data, offset=0.5)
    policy_loss(workers.actor_config(), output, data, loss=ours, training_version=5, meter=meter)
    batch = ours.batches[0]
    assert batch.staleness.tolist() == [3, 1, -1, 1, 0, 0]  # the third token is a tool's
    target, behavior = batch.log_probs.detach(), batch.behavior_log_probs
    # TECHNIQUES: alpha = 1/d for d >= 1; at d = 0 the anchor is the behaviour policy (the default, fresh=behavior)
    share = torch.tensor([1 / 3, 1.0, 0.0, 1.0, 1.0, 1.0])
    weight = torch.exp((1 - share) * (target - behavior))
    trained = batch.mask
    assert meter.result()["importance_weight_max"] == pytest.approx(float(weight[trained].max()), rel=1e-5)
    assert meter.result()["staleness"] == pytest.approx((3 + 1 + 1 + 0 + 0) / 5)
    assert meter.result()["staleness_max"] == 3
    assert float(weight[0]) != 1.0  # the proximal policy isn't the behaviour policy at staleness 3 ...
    assert meter.result()["off_behavior"] == pytest.approx(1 / 5)  # ... and is it everywhere else
    assert meter.result()["version_unknown"] == 0.0


def test_without_spans_two_versions_are_unknown_and_counted(samples):
    samples.extra_fields = [{"min_global_steps": 2, "max_global_steps": 4}] * 8
    ours, meter, data = recording(A3po()), Meter(), samples.batch()
    output, _ = scored(data)
    policy_loss(workers.actor_config(), output, data, loss=ours, training_version=5, meter=meter)
    assert set(ours.batches[0].staleness.tolist()) == {-1}
    assert meter.result()["version_unknown"] == 1.0
    assert meter.result()["off_behavior"] == 0.0


@pytest.mark.parametrize("ahead", [1, 2])
def test_a_version_ahead_of_the_trained_one_is_refused_even_by_one(samples, ahead):
    samples.extra_fields[2] = {"min_global_steps": 3 + ahead, "max_global_steps": 3 + ahead}
    data = samples.batch()
    output, _ = scored(data)
    with pytest.raises(VersionMismatch, match="later than the one in training"):
        policy_loss(workers.actor_config(), output, data, loss=A3po(), training_version=3, meter=Meter())


def test_recompute_takes_the_trainer_s_log_probs_and_refuses_bypass_mode(samples):
    config, loss = workers.actor_config(), A3po(A3poOptions(proximal="recompute"))
    data = samples.batch()
    output, _ = scored(data)
    recorded, meter = recording(loss), Meter()
    policy_loss(config, output, data, loss=recorded, training_version=0, meter=meter, bypassed=False)
    torch.testing.assert_close(recorded.batches[0].proximal_log_probs, torch.cat(samples.old))
    with pytest.raises(ConfigurationError, match="bypass_mode=False"):
        policy_loss(config, output, data, loss=loss, training_version=0, meter=meter)


def test_in_bypass_mode_the_copied_log_probs_are_not_the_trainer_s(samples):
    data, recorded = samples.batch(), recording(A3po())
    output, _ = scored(data)
    policy_loss(workers.actor_config(), output, data, loss=recorded, training_version=0, meter=Meter())
    batch = recorded.batches[0]
    assert (batch.old_log_probs, batch.proximal_log_probs) == (None, None)


def test_missing_log_probs_and_versions_are_named(samples):
    data = samples.batch()
    output, _ = scored(data)
    del data["rollout_log_probs"]
    with pytest.raises(ConfigurationError, match="calculate_log_probs=True"):
        policy_loss(workers.actor_config(), output, data, loss=Ppo(), training_version=0, meter=Meter())
    data = samples.batch()
    del data["metronome_version"]
    with pytest.raises(MetronomeError, match="which version is trained"):
        HostLoss(workers.actor_config(), Ppo())(model_output=output, data=data)


def test_a_stranger_s_loss_of_the_wrong_shape_is_named(samples):
    class Summing:
        name = "summing"
        needs_proximal_forward = keeps_proximal = False

        def __call__(self, batch):
            return TokenLoss(-(batch.log_probs * batch.advantages).sum())

    data = samples.batch()
    output, _ = scored(data)
    with pytest.raises(PluginError, match="'summing' must return a loss of shape"):
        policy_loss(workers.actor_config(), output, data, loss=Summing(), training_version=0, meter=Meter())


# --- inside the worker -------------------------------------------------------------------------------


def updated(worker, samples, loss, rows=None, **extra):
    settings = {"mini_batch_size": 8, "epochs": 1, "seed": 1, "dataloader_kwargs": {"shuffle": False}, **extra}
    worker.set_loss_fn(loss)
    with workers.restored(worker):
        output = worker.train_mini_batch(samples.batch(rows, **settings))
        return reduce_metrics(tu.get(output, "metrics")), workers.weights(worker)


def stale(samples):
    """The last token of row i is of version 3, the others of version i mod 4."""
    lengths = [len(response) for response in samples.responses]
    samples.extra_fields = [{"version_spans": [[i % 4, n - 1], [3, 1]]} for i, n in enumerate(lengths)]
    return samples


def test_our_ppo_in_verl_s_update_gives_verl_s_parameters(worker, samples):
    config = workers.actor_config(**EVERYTHING)
    theirs, wanted = updated(worker, samples, workers.stock_loss(config))
    ours = HostLoss(config, Ppo(PpoOptions(dual_clip=3.0)))
    found, got = updated(worker, samples, ours, metronome_old_log_probs="trainer")
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)
    assert found["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)
    assert found["actor/pg_loss"] == pytest.approx(theirs["actor/pg_loss"], rel=1e-5)
    assert "mfu" in found  # verl's trainer takes it out of the metrics


def test_a3po_makes_no_extra_forward_pass_and_differs_from_ppo_where_it_is_stale(worker, samples, monkeypatch):
    passes = []
    forward = type(worker.engine).forward_step
    monkeypatch.setattr(
        type(worker.engine), "forward_step", lambda *a, **k: passes.append(1) or forward(*a, **k), raising=True
    )
    config = workers.actor_config()
    stale(samples)
    counts, parameters = [], []
    for loss in (workers.stock_loss(config), HostLoss(config, Ppo()), HostLoss(config, A3po())):
        passes.clear()
        metrics, got = updated(worker, samples, loss, metronome_version=3)
        counts.append(len(passes))
        parameters.append(got)
    assert counts[0] == counts[1] == counts[2] > 1
    assert metrics["metronome/loss/calls"] == counts[2]
    trained = sum(int(mask.sum()) for mask in samples.masks)
    moved = sum(len(samples.responses[row]) - 1 for row in (0, 1, 4, 5))  # staleness 3 and 2
    assert metrics["metronome/loss/off_behavior"] == pytest.approx(moved / trained)
    assert metrics["metronome/loss/staleness_max"] == 3
    assert metrics["metronome/loss/importance_weight_max"] > 1.0
    assert (parameters[2] - parameters[1]).abs().max() > 1e-6
    assert "metronome/loss/off_behavior" not in updated(worker, samples, HostLoss(config, Ppo()))[0]


def test_a_fresh_batch_under_a3po_is_ppo(worker, samples):
    config = workers.actor_config()
    found, got = updated(worker, samples, HostLoss(config, A3po()))
    _, wanted = updated(worker, samples, HostLoss(config, Ppo(PpoOptions(anchor="behavior"))))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-7)
    assert found["metronome/loss/off_behavior"] == 0.0


@pytest.mark.parametrize("padding", [0, 2])
def test_metrics_are_those_of_one_micro_batch_however_it_is_cut(worker, samples, padding):
    stale(samples)
    config = workers.actor_config()
    results = []
    for budget in (32, 4096):
        settings = {"mini_batch_size": 8 + padding, "epochs": 1, "seed": 1, "dataloader_kwargs": {"shuffle": False}}
        worker.set_loss_fn(HostLoss(config, A3po()))
        with workers.restored(worker):
            data = samples.batch(padding=padding, metronome_version=3, max_token_len_per_gpu=budget, **settings)
            results.append(tu.get(worker.train_mini_batch(data), "metrics"))
    names = [name for name in results[0] if name.startswith("metronome/") and not name.endswith("calls")]
    assert "metronome/loss/clipped" in names
    for name in names:
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-5, abs=1e-7), name
    assert results[0]["metronome/loss/calls"] > results[1]["metronome/loss/calls"] == 1


def test_several_steps_of_one_version_grow_stale_by_fractions(worker, samples):
    ours = recording(A3po())
    updated(
        worker,
        samples,
        HostLoss(workers.actor_config(), ours),
        mini_batch_size=4,
        epochs=2,
        metronome_progress=(1, 2),
        max_token_len_per_gpu=4096,
    )
    assert [batch.step_fraction for batch in ours.batches] == [0.5, 0.625, 0.75, 0.875]


def test_reuse_keeps_the_first_visit_s_policy_of_every_row(worker, samples):
    ours = recording(A3po(A3poOptions(proximal="reuse")))
    shuffled = {"mini_batch_size": 4, "epochs": 2, "dataloader_kwargs": {"shuffle": True}}
    metrics, _ = updated(
        worker, samples, HostLoss(workers.actor_config(), ours), max_token_len_per_gpu=4096, **shuffled
    )
    first, second = ours.batches[:2], ours.batches[2:]
    assert [batch.proximal_log_probs for batch in first] == [None, None]

    def rows(batches, field):
        found = {}
        for batch in batches:
            lengths = batch.cu_seqlens.diff().tolist()
            parts = zip(batch.behavior_log_probs.split(lengths), field(batch).split(lengths), strict=True)
            found.update({tuple(key.tolist()): value for key, value in parts})
        return found

    visited = rows(first, lambda batch: batch.log_probs.detach())
    again = rows(second, lambda batch: batch.proximal_log_probs)
    assert visited.keys() == again.keys()
    assert len(again) == 8
    for key, value in again.items():
        kept = value != 0.0  # a tool's tokens aren't kept
        torch.testing.assert_close(value[kept], visited[key][kept])
    assert sum(int((value != 0.0).sum()) for value in again.values()) == sum(int(m.sum()) for m in samples.masks)
    moved = [float((b.log_probs.detach() - b.proximal_log_probs)[b.mask].abs().max()) for b in second]
    assert min(moved) > 1e-4  # the weights have moved since the first visit
    assert 0.4 < metrics["metronome/loss/off_behavior"] <= 1.0
