"""Gradients of parts are the gradient of one batch in verl's real Megatron engine too, on one rank and on two."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
pytest.importorskip("megatron.core", reason="megatron-core isn't installed: requirements/verl-megatron-nodeps.txt")
pytest.importorskip("mbridge", reason="mbridge isn't installed: requirements/verl-megatron-nodeps.txt")

import megatron_room as room
import torch
import workers
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics

from metronome.a3po.loss import A3po
from metronome.errors import ConfigurationError
from metronome_verl.loss import HostLoss
from metronome_verl.megatron_accumulate import check_engine

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "token-sum")


@pytest.fixture(scope="module", autouse=True)
def _room():
    workers.ready()
    torch.set_num_threads(1)
    with room.furnished():
        yield
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


@pytest.fixture
def samples():
    return workers.Samples()


@pytest.fixture
def sharded(monkeypatch):
    """The same model in verl's FSDP engine."""
    stock_folder = room.model_folder()
    monkeypatch.setattr(workers, "model_folder", lambda: stock_folder)
    return workers.worker()


def loss_in(mode):
    return workers.stock_loss(workers.actor_config(loss_agg_mode=mode, **room.LOSS))


def stock(made, samples, **extra):
    """verl's own update with all rows as one mini-batch: gradient before the clip, metrics."""
    settings = {"mini_batch_size": 8, "epochs": 1, "seed": 1, "dataloader_kwargs": {"shuffle": False}, **extra}
    with room.watched(made) as seen:
        metrics = tu.get(made.train_mini_batch(samples.batch(**settings)), "metrics")
    return seen["gradient"], reduce_metrics(metrics)


def streamed(made, samples, split=room.SPLIT, between=None, **extra):
    """The same by our accumulation."""
    for part in split:
        made.accumulate(samples.batch(part, **extra))
        if between is not None:
            between(part)
    with room.watched(made) as seen:
        metrics = made.step(8)
    return seen["gradient"], metrics


def test_the_room_s_megatron_is_the_model_that_fsdp_trains(samples, sharded):
    _, found = stock(room.worker(loss_in("token-mean")), samples)
    sharded.set_loss_fn(loss_in("token-mean"))
    settings = {"mini_batch_size": 8, "epochs": 1, "seed": 1, "dataloader_kwargs": {"shuffle": False}}
    wanted = reduce_metrics(tu.get(sharded.train_mini_batch(samples.batch(**settings)), "metrics"))
    for name in ("grad_norm", "actor/pg_loss", "actor/entropy_loss", "kl_loss"):
        assert found[name] == pytest.approx(wanted[name], rel=1e-5), name


@pytest.mark.parametrize("options", [{}, {"use_distributed_optimizer": False}, {"remove_padding": False}], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_gradient_norm_and_step_are_those_of_one_batch(samples, mode, options):
    one, other = room.worker(loss_in(mode), **options), room.worker(loss_in(mode), **options)
    wanted, theirs = stock(one, samples)
    assert theirs["grad_norm"] > 0.4  # so that Megatron's clipping acts
    gradient, found = streamed(other, samples)
    assert room.gap(gradient, wanted) < 1e-6
    assert found["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-6)
    torch.testing.assert_close(room.weights(other), room.weights(one), rtol=0, atol=2e-6)
    assert found["lr"] == pytest.approx(theirs["lr"])
    for key in ("pg_loss", "entropy_loss"):
        assert found[key] == pytest.approx(theirs[f"actor/{key}"], rel=1e-5, abs=1e-7)
    assert found["kl_loss"] == pytest.approx(theirs["kl_loss"], rel=1e-5)
    assert found["metronome/weights/changed"] == 1


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_without_the_rescaling_it_is_another_gradient(samples, mode, monkeypatch):
    wanted, _ = stock(room.worker(loss_in(mode)), samples)
    made = room.worker(loss_in(mode))
    monkeypatch.setattr(made, "_factor", lambda period, counts: 1.0)
    gradient, _ = streamed(made, samples, global_batch_size=13)
    assert room.gap(gradient, wanted) > 0.1


def test_log_probs_between_parts_a_second_period_and_other_splits_change_nothing(samples):
    wanted, _ = stock(room.worker(loss_in("token-mean")), samples)
    made = room.worker(loss_in("token-mean"))
    gradient, _ = streamed(
        made, samples, between=lambda part: made.infer_batch(samples.batch(part, compute_loss=False))
    )
    assert room.gap(gradient, wanted) < 1e-6
    one, other = room.worker(loss_in("token-mean")), room.worker(loss_in("token-mean"))
    for each in (one, other):
        streamed(each, samples)
    again, _ = streamed(one, samples, ([7], [5, 6], [0, 4, 2], [3, 1]))
    theirs, _ = stock(other, samples)
    assert room.gap(again, theirs) < 1e-5  # two steps apart from each other by rounding


def test_our_loss_and_its_metrics_are_those_of_fsdp_in_one_batch_and_in_parts(samples, sharded):
    samples.extra_fields = [{"version_spans": [[i % 4, 1], [3, len(r)]]} for i, r in enumerate(samples.responses)]
    ours = partial(HostLoss, workers.actor_config(**room.LOSS), A3po())
    sharded.set_loss_fn(ours())
    settings = {"mini_batch_size": 8, "epochs": 1, "seed": 1, "dataloader_kwargs": {"shuffle": False}}
    fsdp = reduce_metrics(tu.get(sharded.train_mini_batch(samples.batch(metronome_version=3, **settings)), "metrics"))
    wanted, theirs = stock(room.worker(ours()), samples, metronome_version=3)
    gradient, found = streamed(room.worker(ours()), samples, metronome_version=3)
    assert room.gap(gradient, wanted) < 1e-6
    names = [name for name in theirs if name.startswith("metronome/loss/") and not name.endswith("calls")]
    assert "metronome/loss/off_behavior" in names
    assert theirs["metronome/loss/off_behavior"] > 0
    for name in names:
        assert theirs[name] == pytest.approx(fsdp[name], rel=1e-5, abs=1e-7), name
        assert found[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7), name
    assert theirs["grad_norm"] == pytest.approx(fsdp["grad_norm"], rel=1e-5)


def test_an_error_in_a_part_ends_the_period_and_leaves_megatron_as_it_was(samples):
    made = room.worker(loss_in("token-mean"))
    wanted, _ = stock(room.worker(loss_in("token-mean")), samples)
    made.accumulate(samples.batch([0, 1]))

    def broken(**_):
        raise RuntimeError("broken")

    made.set_loss_fn(broken)
    with pytest.raises(RuntimeError, match="broken"):
        made.accumulate(samples.batch([2]))
    assert room.gradient(made).abs().max() == 0
    made.set_loss_fn(loss_in("token-mean"))
    gradient, _ = stock(made, samples)
    assert room.gap(gradient, wanted) < 1e-6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda chunk, config: setattr(chunk.ddp_config, "overlap_grad_reduce", True), "overlap_grad_reduce=False"),
        (lambda chunk, config: setattr(config, "calculate_per_token_loss", True), "own number of tokens"),
        (lambda chunk, config: setattr(config, "num_moe_experts", 4), "router losses"),
        (lambda chunk, config: setattr(config, "mtp_num_layers", 1), "multi-token prediction"),
    ],
)
def test_an_engine_in_which_parts_do_not_add_up_is_refused(change, words):
    made = room.worker(loss_in("token-mean"))
    check_engine(made.engine)
    [chunk] = made.engine.module
    change(chunk, chunk.config)
    with pytest.raises(ConfigurationError, match=words):
        check_engine(made.engine)


def test_gradients_outside_megatron_s_buffers_are_refused():
    with pytest.raises(ConfigurationError, match="aren't in Megatron's own buffers"):
        check_engine(SimpleNamespace(module=[torch.nn.Linear(1, 1)]))


# --- shared prompts -----------------------------------------------------------------------------------


def of_responses(made, samples):
    """Log-probs and entropies of every response token, from a pass without gradients."""
    output = made.infer_batch(samples.batch(compute_loss=False, calculate_entropy=True))
    prompts = [len(prompt) for prompt in samples.prompts]
    return [
        torch.cat([row[length - 1 : -1] for row, length in zip(output[name].unbind(), prompts, strict=True)])
        for name in ("log_probs", "entropy")
    ]


@pytest.mark.parametrize("remove_padding", [True, False])
def test_shared_prompts_give_the_stock_log_probs_entropies_and_gradient(remove_padding):
    samples = room.grouped()
    own, ours = (make(loss_in("token-mean"), remove_padding=remove_padding) for make in (room.worker, room.sharing))
    for wanted, found in zip(of_responses(own, samples), of_responses(ours, samples), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-6)
    ours.engine.drain()
    wanted, theirs = stock(own, samples)
    gradient, found = stock(ours, samples)
    assert room.gap(gradient, wanted) < 1e-5
    for name in ("grad_norm", "actor/pg_loss", "actor/entropy_loss", "kl_loss"):
        assert found[name] == pytest.approx(theirs[name], rel=1e-5), name
    passes = found["metronome/attention/micro_batches"]
    assert found["metronome/attention/calls"] == 2 * passes > 0  # two layers
    assert found["metronome/attention/tokens_fed"] < found["metronome/attention/tokens_separate"]


def test_shared_prompts_in_parts_give_the_gradient_of_one_stock_batch():
    samples = room.grouped()
    wanted, _ = stock(room.worker(loss_in("token-mean")), samples)
    gradient, found = streamed(room.sharing(loss_in("token-mean")), samples, ([4, 5], [0, 1, 6, 7], [2, 3]))
    assert room.gap(gradient, wanted) < 1e-5
    assert found["metronome/attention/calls"] == 2 * found["metronome/attention/micro_batches"]


def test_one_wrong_key_is_another_gradient():
    samples = room.grouped()
    wanted, _ = stock(room.worker(loss_in("token-mean")), samples)
    gradient, _ = stock(room.sharing(loss_in("token-mean"), room.OneWrongKey()), samples)
    assert room.gap(gradient, wanted) > 1e-3


def test_what_cannot_be_shared_goes_verl_s_own_way_and_is_counted(caplog):
    samples = room.grouped()
    made = room.sharing(loss_in("token-mean"))
    batches = [samples.batch(compute_loss=False) for _ in range(2)]
    for batch in batches:
        batch["temperature"] = torch.tensor([1.0] * 4 + [0.5] * 4)
    own, ours = (
        one.infer_batch(batch)["log_probs"].values()
        for one, batch in zip((room.worker(loss_in("token-mean")), made), batches, strict=True)
    )
    torch.testing.assert_close(ours, own, rtol=0, atol=0)
    counts = made.engine.drain()
    assert (counts.micro_batches, counts.attention_calls) == (0, 0)
    assert counts.passed_through > 0
    assert "different temperatures" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"virtual_pipeline_model_parallel_size": 2}, "virtual_pipeline_model_parallel_size=null"),
        ({"dynamic_context_parallel": True, "max_seqlen_per_dp_cp_rank": 64}, "dynamic_context_parallel=False"),
    ],
)
def test_settings_under_which_prompts_cannot_be_shared_are_refused(options, words):
    with pytest.raises(ConfigurationError, match=words):
        room.sharing(loss_in("token-mean"), **options)


# --- two ranks ----------------------------------------------------------------------------------------


def test_parts_on_two_ranks_are_one_batch_data_tensor_and_pipeline_parallel(tmp_path):
    """One process a rank, on gloo."""
    script = Path(__file__).with_name("megatron_ranks.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(said)
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for tied in (False, True):
        _, alone = stock(room.worker(loss_in("token-mean"), tied=tied), room.grouped())
        for name, one in found[0].items():
            if one["tied"] == tied:
                assert one["stock_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5), name
    for name in found[0]:
        one, other = (rank[name] for rank in found)
        assert max(one["gap"], other["gap"]) < 1e-6, name
        assert one["metrics"] == pytest.approx(other["metrics"]), name
        assert one["metrics"]["grad_norm"] == pytest.approx(one["stock_norm"], rel=1e-6), name
        assert one["metrics"]["pg_loss"] == pytest.approx(one["stock_pg_loss"], rel=1e-5), name
        assert max(one["finalised_each"], other["finalised_each"]) > 0.01, name
        assert max(one["shared_gap"], other["shared_gap"]) < 1e-5, name
        assert one["shared"]["metronome/attention/calls"] > 0, name
        assert one["shared"]["grad_norm"] == pytest.approx(one["stock_norm"], rel=1e-5), name
