"""Gradients of parts are the gradient of one batch, in verl's real workers: any split, order, mode and padding."""

import itertools
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import torch
import two_ranks
import workers
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics

from metronome.a3po.loss import A3po
from metronome.a3po.options import PpoOptions
from metronome.a3po.ppo import Ppo
from metronome.errors import ConfigurationError, MetronomeError
from metronome_verl import worker as module
from metronome_verl.config import WorkerPart
from metronome_verl.loss import HostLoss
from metronome_verl.worker import MetronomeWorker, check_streaming

EVERYTHING = {"entropy_coeff": 0.05, "use_kl_loss": True, "kl_loss_coef": 0.1, "loss_scale_factor": 16}
MODES = ("token-mean", "token-sum", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
SPLITS = ([[0, 1, 2, 3, 4, 5, 6, 7]], [[0, 1], [2, 3, 4], [5], [6, 7]], [[7], [5, 6], [0, 4, 2], [3, 1]])


@pytest.fixture(scope="module")
def worker():
    torch.set_num_threads(1)
    return workers.worker()


@pytest.fixture
def samples():
    return workers.Samples()


def stock(worker, samples, loss, **extra):
    """verl's own update with all rows as one mini-batch: gradient before the clip, metrics, weights after the step."""
    seen = {}
    step = worker.engine.optimizer_step

    def watched():
        seen["gradient"] = workers.gradient(worker)
        return step()

    settings = {"mini_batch_size": 8, "epochs": 1, "seed": 1, "dataloader_kwargs": {"shuffle": False}, **extra}
    worker.set_loss_fn(loss)
    worker.engine.optimizer_step = watched
    try:
        with workers.restored(worker):
            metrics = tu.get(worker.train_mini_batch(samples.batch(**settings)), "metrics")
            return seen["gradient"], reduce_metrics(metrics), workers.weights(worker)
    finally:
        del worker.engine.optimizer_step


def streamed(worker, samples, loss, split, rows=None, step=True, **extra):
    """The same by our accumulation."""
    worker.set_loss_fn(loss)
    with workers.restored(worker):
        for part in split:
            padding = extra.pop("padding", 0)
            worker.accumulate(samples.batch(part, padding=padding, **extra))
            extra["padding"] = padding
        raw, seen = workers.gradient(worker), {}
        clipped_step = worker.engine.optimizer_step

        def watched():
            seen["gradient"] = workers.gradient(worker)
            return clipped_step()

        worker.engine.optimizer_step = watched
        try:
            metrics = worker.step(rows)
        finally:
            del worker.engine.optimizer_step
        return seen.get("gradient", raw), metrics, workers.weights(worker)


def close(left, right, within=1e-6):
    return float((left - right).abs().max() / right.abs().max()) < within


@pytest.mark.parametrize("mode", MODES)
def test_gradient_norm_and_step_are_those_of_one_batch_in_any_split_and_order(worker, samples, mode):
    loss = workers.stock_loss(workers.actor_config(loss_agg_mode=mode, **EVERYTHING))
    wanted, theirs, weights = stock(worker, samples, loss)
    assert theirs["grad_norm"] > 0.5  # so that verl's clipping acts
    for split in SPLITS:
        gradient, found, stepped = streamed(worker, samples, loss, split)
        assert close(gradient, wanted), split
        assert found["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)
        torch.testing.assert_close(stepped, weights, rtol=0, atol=2e-6)
        assert found["lr"] == pytest.approx(theirs["lr"])
        for key in ("pg_loss", "entropy_loss"):
            assert found[key] == pytest.approx(theirs[f"actor/{key}"], rel=1e-5, abs=1e-7)
        assert found["kl_loss"] == pytest.approx(theirs["kl_loss"], rel=1e-5)
        if len(split) == 1:  # verl takes the mean of micro-batches here, which depends on how they are cut
            assert found["pg_clipfrac"] == pytest.approx(theirs["actor/pg_clipfrac"], rel=1e-5)
            assert found["ppo_kl"] == pytest.approx(theirs["actor/ppo_kl"], rel=1e-5)
        assert found["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("loss", [Ppo(PpoOptions(dual_clip=3.0)), A3po()], ids=["ppo", "a3po"])
def test_our_losses_add_up_too_and_so_do_their_metrics(worker, samples, loss):
    samples.extra_fields = [{"version_spans": [[i % 4, 1], [3, len(r)]]} for i, r in enumerate(samples.responses)]
    ours = HostLoss(workers.actor_config(**EVERYTHING), loss)
    wanted, theirs, _ = stock(worker, samples, ours, metronome_version=3)
    for split in SPLITS[1:]:
        gradient, found, _ = streamed(worker, samples, ours, split, metronome_version=3)
        assert close(gradient, wanted)
        names = [name for name in theirs if name.startswith("metronome/loss/") and not name.endswith("calls")]
        assert "metronome/loss/clipped" in names
        for name in names:
            assert found[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_verl_s_own_parts_without_the_rescaling_are_wrong_where_the_denominator_is_the_part_s(worker, samples, mode):
    loss = workers.stock_loss(workers.actor_config(loss_agg_mode=mode, **EVERYTHING))
    wanted, *_ = stock(worker, samples, loss)
    worker.set_loss_fn(loss)
    with workers.restored(worker):
        for part in SPLITS[1]:
            worker.forward_backward(samples.batch(part, global_batch_size=len(part)))
        naive = workers.gradient(worker)
    assert not close(naive, wanted, 0.1)
    assert not close(naive / len(SPLITS[1]), wanted, 0.01)


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_verl_pads_with_change_nothing(worker, samples, mode):
    loss = workers.stock_loss(workers.actor_config(loss_agg_mode=mode, **EVERYTHING))
    wanted, plain, weights = streamed(worker, samples, loss, SPLITS[1])
    gradient, padded, stepped = streamed(worker, samples, loss, SPLITS[1], padding=2)
    assert close(gradient, wanted)
    torch.testing.assert_close(stepped, weights, rtol=0, atol=2e-6)
    for key in ("pg_loss", "entropy_loss", "kl_loss", "grad_norm", "metronome/trained/rows"):
        assert padded[key] == pytest.approx(plain[key], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum", "token-mean"])
def test_the_denominator_is_what_was_trained_whatever_was_expected(worker, samples, mode):
    loss = workers.stock_loss(workers.actor_config(loss_agg_mode=mode, **EVERYTHING))
    wanted, *_ = stock(worker, samples, loss)
    gradient, found, _ = streamed(worker, samples, loss, SPLITS[1], global_batch_size=13)
    assert close(gradient, wanted)
    assert found["metronome/trained/rows"] == 8
    # a row without any trained token counts where the trainer counts it
    counted, *_ = streamed(worker, samples, loss, SPLITS[1], rows=10)
    assert close(counted, wanted * (1.0 if mode == "token-mean" else 8 / 10))


def test_fixed_micro_batches_take_parts_of_any_size(worker, samples):
    loss = workers.stock_loss(workers.actor_config(**EVERYTHING))
    wanted, *_ = stock(worker, samples, loss)
    fixed = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
    gradient, *_ = streamed(worker, samples, loss, SPLITS[1], **fixed)  # of 2, 3, 1 and 2 rows
    assert close(gradient, wanted)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_fsdp1_and_offloaded_parameters_keep_their_gradients_between_parts(samples, strategy, offload, monkeypatch):
    if strategy == "fsdp":
        monkeypatch.setattr("verl.utils.fsdp_utils.get_device_id", lambda: 0)  # its offload says "cpu:0"
    made = workers.worker(strategy, param_offload=offload, optimizer_offload=offload)
    loss = workers.stock_loss(workers.actor_config(strategy, **EVERYTHING))
    wanted, theirs, weights = stock(made, samples, loss)
    gradient, found, stepped = streamed(made, samples, loss, SPLITS[1])
    assert close(gradient, wanted)
    assert found["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)
    torch.testing.assert_close(stepped, weights, rtol=0, atol=2e-6)


def test_log_probs_computed_between_parts_leave_the_gradient_alone(worker, samples):
    loss = workers.stock_loss(workers.actor_config(**EVERYTHING))
    wanted, *_ = stock(worker, samples, loss)
    worker.set_loss_fn(loss)
    with workers.restored(worker):
        for part in SPLITS[1]:
            worker.infer_batch(samples.batch(part, compute_loss=False))
            worker.accumulate(samples.batch(part))
        factor = worker._factor(worker._period, worker._period.counts)
        assert close(workers.gradient(worker) * factor, wanted)
        worker.step()


def test_a_second_period_starts_from_nothing(worker, samples):
    loss = HostLoss(workers.actor_config(), Ppo())
    first, once, _ = streamed(worker, samples, loss, SPLITS[1])
    second, again, _ = streamed(worker, samples, loss, SPLITS[2])
    assert close(first, second)
    assert (
        again["metronome/trained/tokens"] == once["metronome/trained/tokens"] == sum(map(int, map(sum, samples.masks)))
    )


def test_a_period_without_a_trained_token_steps_nowhere(worker, samples):
    samples.masks = [torch.zeros_like(mask) for mask in samples.masks]
    before = workers.weights(worker)
    loss = HostLoss(workers.actor_config(**EVERYTHING), A3po())
    _, found, after = streamed(worker, samples, loss, SPLITS[1])
    assert torch.equal(before, after)
    assert found["grad_norm"] == found["metronome/trained/tokens"] == 0
    assert all(math.isfinite(value) for value in found.values())


def test_an_empty_part_is_left_out(worker, samples):
    loss = workers.stock_loss(workers.actor_config(**EVERYTHING))
    wanted, *_ = stock(worker, samples, loss)
    worker.set_loss_fn(loss)
    with workers.restored(worker):
        empty = TensorDict({}, batch_size=(0,))  # what verl's bridge makes of a rank's share without samples
        tu.assign_non_tensor(empty, global_batch_size=8)
        worker.accumulate(empty)
        worker.accumulate(samples.batch())
        factor = worker._factor(worker._period, worker._period.counts)
        assert close(workers.gradient(worker) * factor, wanted)
        assert worker.step()["metronome/trained/rows"] == 8


def test_a_step_without_parts_or_with_too_few_rows_is_refused(worker, samples):
    with pytest.raises(MetronomeError, match="no gradient to step with"):
        worker.step()
    worker.set_loss_fn(workers.stock_loss(workers.actor_config()))
    worker.accumulate(samples.batch([0, 1, 2]))
    with pytest.raises(MetronomeError, match="more rows were trained than the batch has"):
        worker.step(rows=2)
    with pytest.raises(MetronomeError, match="no gradient to step with"):
        worker.step()


def test_parts_must_agree_on_the_rows_expected_and_an_error_ends_the_period(worker, samples):
    worker.set_loss_fn(workers.stock_loss(workers.actor_config()))
    worker.accumulate(samples.batch([0, 1]))
    with pytest.raises(MetronomeError, match="same number of rows"):
        worker.accumulate(samples.batch([2], global_batch_size=9))

    def broken(**_):
        raise RuntimeError("broken")

    worker.set_loss_fn(broken)
    with pytest.raises(RuntimeError, match="broken"):
        worker.accumulate(samples.batch([2]))
    with pytest.raises(MetronomeError, match="no gradient to step with"):
        worker.step()
    assert all(p.grad is None for p in worker.engine.module.parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss_agg_mode": "seq-mean-token-sum-norm"}, "loss_scale_factor=<data.max_response_length>"),
        ({"policy_loss": SimpleNamespace(loss_mode="kl_cov")}, "loss_mode=vanilla"),
        ({"strategy": "torchtitan"}, "isn't known where this engine keeps the gradients"),
        ({"distillation": True}, "distillation"),
    ],
)
def test_what_does_not_add_up_is_refused_with_what_mends_it(options, words):
    config = SimpleNamespace(
        strategy="fsdp2",
        loss_agg_mode="token-mean",
        loss_scale_factor=None,
        policy_loss=SimpleNamespace(loss_mode="vanilla"),
    )
    check_streaming(config, ours=False)
    distillation = options.pop("distillation", False)
    vars(config).update(options)
    with pytest.raises(ConfigurationError, match=words):
        check_streaming(config, ours=False, distillation=distillation)


# --- verl's actor worker ------------------------------------------------------------------------------


def actor(monkeypatch, part, role="actor"):
    """Our actor worker around a fresh training worker, without verl's own ``init_model``."""
    made = object.__new__(MetronomeWorker)
    made.config = SimpleNamespace(actor=SimpleNamespace(strategy="fsdp2"), rollout=SimpleNamespace(response_length=16))
    made.role, made.distillation_enabled, made.actor = role, False, None
    config = workers.actor_config(**EVERYTHING)

    def init_model(self):
        self.actor = workers.worker()
        self.actor.set_loss_fn(workers.stock_loss(config))

    monkeypatch.setattr(module.DetachActorWorker, "init_model", init_model)
    monkeypatch.setattr(module, "worker_part", lambda _: part)
    made.init_model()
    return made


def test_the_actor_worker_accumulates_and_steps_with_our_loss(monkeypatch, samples):
    part = WorkerPart("periodic", Ppo(PpoOptions(dual_clip=3.0)), None)
    made = actor(monkeypatch, part)
    assert isinstance(made.actor.loss_fn, HostLoss)
    assert made.actor.longest == 16
    theirs = workers.stock_loss(workers.actor_config(**EVERYTHING))
    _, metrics, weights = stock(made.actor, samples, theirs)
    made.actor.set_loss_fn(HostLoss(workers.actor_config(**EVERYTHING), part.loss))
    before = workers.weights(made.actor)
    trained = 0.0
    for rows in SPLITS[2]:
        output = made.metronome_accumulate(samples.batch(rows, metronome_old_log_probs="trainer"))
        trained += tu.get(output, "metrics")["metronome/part/rows"]
        assert torch.equal(workers.weights(made.actor), before)
    found = made.metronome_step(rows=8)
    assert trained == 8
    assert found["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-6)
    torch.testing.assert_close(workers.weights(made.actor), weights, rtol=0, atol=2e-6)
    assert found["metronome/loss/calls"] >= 4


def test_without_a_loss_of_ours_verl_s_stays(monkeypatch):
    made = actor(monkeypatch, WorkerPart("synchronous", None, None))
    assert isinstance(made.actor.loss_fn, partial)


def test_shared_attention_in_parts_is_counted_and_gives_the_stock_gradient(monkeypatch, samples):
    from metronome.shared_prompt.reference import ReferenceBackend

    for first, other in ((0, 1), (2, 3), (4, 5), (6, 7)):  # groups of two rows with one prompt
        samples.prompts[other] = samples.prompts[first]
    loss = workers.stock_loss(workers.actor_config(**EVERYTHING))
    wanted, *_ = stock(workers.worker(), samples, loss)
    backend = ReferenceBackend()
    made = actor(monkeypatch, WorkerPart("periodic", None, backend))
    gradient, found, _ = streamed(made.actor, samples, loss, [[4, 5], [0, 1, 6, 7], [2, 3]])
    assert close(gradient, wanted, 1e-5)
    assert found["metronome/attention/calls"] > 0
    assert found["metronome/attention/tokens_fed"] < found["metronome/attention/tokens_separate"]


# --- two ranks ----------------------------------------------------------------------------------------


def test_two_ranks_with_uneven_and_empty_shares_have_the_gradient_of_one(tmp_path, worker):
    """One process a rank, on gloo."""
    script = Path(__file__).with_name("two_ranks.py")
    store = tmp_path / "store"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(store)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(itertools.chain(said))
    assert [text.count("the gradient of one batch") for text in said] == [4, 4]
    assert all("the adapter is published" in text for text in said)
    batch = two_ranks.grouped()
    for mode in two_ranks.MODES:
        loss = workers.stock_loss(workers.actor_config(loss_agg_mode=mode, **two_ranks.EXTRAS))
        alone, *_ = stock(worker, batch, loss)
        for rank in range(2):
            assert close(torch.load(f"{store}.apart.{mode}.{rank}"), alone)
            assert close(torch.load(f"{store}.shared.{mode}.{rank}"), alone, 1e-5)
