"""Shared prompts in verl's real FSDP engines: the same log-probs, entropies, gradients and step as verl's own rows."""

from __future__ import annotations

import logging
import os
import random
from dataclasses import replace

import pytest

pytest.importorskip("verl")

import harness
import torch
from harness import Batch, gradients, infer, train, worker
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from metronome.errors import ConfigurationError, EqualityViolated
from metronome.shared_prompt.host import HostAttention
from metronome.shared_prompt.options import SharedPromptOptions
from metronome.shared_prompt.select import SharedPromptAttention
from metronome_verl import engine, fsdp_engine
from metronome_verl import rows as packing
from metronome_verl.limits import why_separate

TOLERANCE = 3e-6  # nats, float32
STRATEGIES = ("fsdp", "fsdp2")
DROPOUT = {"attn_implementation": "sdpa", "attention_dropout": 0.1}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return harness.save_model(tmp_path_factory.mktemp("qwen2"))


def pair(model, attention=None, **options):
    """verl's own worker and one with shared prompts, from the same weights."""
    stock = worker(model, **options)
    with engine.building(attention or SharedPromptAttention()) as made:
        shared = worker(model, **options)
    assert made == [shared.engine]
    return stock, shared


def furthest(one, other):
    assert len(one) == len(other)
    return (torch.cat(one) - torch.cat(other)).abs().max().item()


def relative(found, wanted):
    """Largest difference of any gradient entry, relative to the largest entry of all."""
    assert list(found) == list(wanted)
    scale = max(grad.abs().max() for grad in wanted.values())
    return max(((found[name] - grad).abs().max() / scale).item() for name, grad in wanted.items())


def old_log_probs(log_probs):
    """An anchor off the policy, so that ratios, clipping and their gradients take part."""
    draw = torch.Generator().manual_seed(3)
    return [row + 0.3 * torch.randn(len(row), generator=draw) for row in log_probs]


def same_log_probs(stock, shared, batch, **others):
    wanted, wanted_entropies = infer(stock, batch, **others)
    found, entropies = infer(shared, batch, **others)
    assert [len(row) for row in found] == [len(row) for row in batch.responses]
    assert furthest(found, wanted) < TOLERANCE
    assert furthest(entropies, wanted_entropies) < TOLERANCE
    return wanted


class PlainCausal(SharedPromptAttention):
    """The negative control: the mask is dropped, every token sees the whole row before it."""

    def attend(self, q, k, v, plan, scale, *, window=None, sinks=None):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)


UNCHECKED = SharedPromptOptions(self_check=False)


@pytest.mark.parametrize("remove_padding", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_log_probs_and_entropies_are_verls_own(model, strategy, remove_padding):
    stock, shared = pair(model, strategy=strategy, remove_padding=remove_padding)
    batch = Batch()
    same_log_probs(stock, shared, batch)
    counts = shared.engine.drain()
    prompts = 20 + 9 + 14
    assert counts.tokens_fed == prompts + sum(len(row) for row in batch.responses) < batch.tokens
    assert counts.tokens_separate == batch.tokens
    assert (counts.attention_calls, counts.micro_batches, counts.passed_through) == (2, 1, 0)
    assert shared.engine.counts == fsdp_engine.Counts()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_and_the_step_are_verls_own(model, strategy, checkpointing):
    stock, shared = pair(model, strategy=strategy, checkpointing=checkpointing, tinker=True)
    batch = Batch(tool=3)
    old = old_log_probs(same_log_probs(stock, shared, batch))
    assert relative(gradients(shared, batch, old), gradients(stock, batch, old)) < 1e-6
    wanted, found = train(stock, batch, old), train(shared, batch, old)
    assert found["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-6)
    assert found["actor/pg_loss"] == pytest.approx(wanted["actor/pg_loss"], abs=1e-6)
    before = infer(worker(model, strategy=strategy), batch)[0]
    after = same_log_probs(stock, shared, batch)
    assert furthest(before, after) > 1e-2  # the step moved the model


def test_a_dropped_mask_changes_log_probs_and_gradients(model):
    stock, shared = pair(model, PlainCausal(UNCHECKED), tinker=True)
    batch = Batch()
    wanted, _ = infer(stock, batch)
    assert furthest(infer(shared, batch)[0], wanted) > 1e-2
    old = old_log_probs(wanted)
    assert relative(gradients(shared, batch, old), gradients(stock, batch, old)) > 1e-2


def test_the_entropy_bonus_has_verls_gradient(model):
    stock, shared = pair(model, tinker=True, actor_options={"entropy_coeff": 0.5})
    batch = Batch()
    old = old_log_probs(infer(stock, batch)[0])
    wanted = gradients(stock, batch, old)
    assert relative(gradients(shared, batch, old), wanted) < 1e-6
    assert relative(gradients(worker(model, tinker=True), batch, old), wanted) > 1e-2


def test_several_micro_batches_accumulate_to_verls_gradient(model):
    stock, shared = pair(model, tinker=True)
    batch, fours = Batch(sizes=(4, 2, 2), prompt_lens=(20, 9, 14)), {"micro_batch_size_per_gpu": 4}
    old = old_log_probs(same_log_probs(stock, shared, batch, **fours))
    assert shared.engine.drain().micro_batches == 2
    assert relative(gradients(shared, batch, old, **fours), gradients(stock, batch, old)) < 1e-6


def test_dynamic_batches_keep_groups_whole_and_count_tokens_after_sharing(model, monkeypatch):
    stock, shared = pair(model, tinker=True, dynamic=70)
    batch = Batch(sizes=(4, 3, 2, 1), prompt_lens=(20, 12, 9, 14), longest=9)
    order = random.Random(1).sample(range(10), 10)
    batch = batch.rows(order)  # members of a group stand apart
    seen = []
    monkeypatch.setattr(fsdp_engine, "read_rows", lambda data: (seen.append(packing.read_rows(data)), seen[-1])[1])
    old = old_log_probs(same_log_probs(stock, shared, batch))  # restored to the order of the batch
    whole, micro = seen[0], seen[1:]
    assert all(rows.tokens <= 70 for rows in micro)
    assert sum(len(rows.groups) for rows in micro) == len(whole.groups) == 4
    assert len(micro) == 2 < -(-batch.tokens // 70)
    assert relative(gradients(shared, batch, old), gradients(stock, batch, old)) < 1e-6


def test_a_group_larger_than_the_budget_is_cut_and_a_longer_row_refused(model):
    stock, shared = pair(model, dynamic=40)
    same_log_probs(stock, shared, Batch(sizes=(6,), prompt_lens=(20,)))
    assert shared.engine.drain().micro_batches > 2
    with pytest.raises(ConfigurationError, match="a row is longer than a micro-batch may be"):
        infer(shared, Batch(sizes=(2,), prompt_lens=(35,)))


def test_rows_of_one_rollout_with_longer_prompts_share_what_they_have_in_common(model):
    stock, shared = pair(model)
    batch = Batch(sizes=(2,), prompt_lens=(20,), uids=True)
    for row in range(2):  # a second turn: the first one, an answer from outside, a new response
        told = torch.randint(2, harness.VOCABULARY, (4,), generator=torch.Generator().manual_seed(row))
        batch.prompts.append(torch.cat([batch.prompts[row], batch.responses[row], told]))
        batch.responses.append(batch.responses[row].flip(0))
        batch.masks.append(batch.masks[row])
        batch.advantages.append(batch.advantages[row])
        batch.uids.append("uid0")
    same_log_probs(stock, shared, batch)
    assert shared.engine.drain().tokens_fed == batch.tokens - 3 * 20
    batch.uids = None
    same_log_probs(stock, shared, batch)
    assert shared.engine.drain().tokens_fed == batch.tokens - 20  # only equal prompts are known to belong together


def test_equal_prompts_share_though_another_of_their_uid_differs_early(model):
    stock, shared = pair(model)
    batch = Batch(sizes=(3, 1), prompt_lens=(20, 20), uids=True)
    batch.prompts[3][:2] = batch.prompts[0][:2]
    batch.uids = ["one"] * 4
    same_log_probs(stock, shared, batch)
    assert shared.engine.drain().tokens_fed == batch.tokens - 2 * 20


def test_every_row_has_its_own_temperature(model):
    stock, shared = pair(model)
    batch = Batch()
    mixed = torch.tensor([0.5, 0.5, 2.0, 1.0, 1.0, 1.0, 0.7, 0.7])
    warm = same_log_probs(stock, shared, batch, temperature=mixed)
    same_log_probs(stock, shared, batch, temperature=0.6)
    assert furthest(warm, infer(stock, batch)[0]) > 1e-2


def test_prompt_positions_are_zero_and_nothing_else(model):
    _, shared = pair(model)
    batch = Batch(sizes=(2,), prompt_lens=(20,))
    out = shared.infer_batch(batch.data(compute_loss=False))["log_probs"].unbind()
    for row, response in zip(out, batch.responses, strict=True):
        assert len(row) == 20 + len(response)
        assert row.nonzero()[:, 0].tolist() == list(range(19, 19 + len(response)))


def test_rows_are_padded_to_buckets_where_verl_pads_them(model):
    options = {"pad_to_length": True, "pad_to_length_bucket": 64}
    stock, shared = pair(model, engine_options=options, tinker=True)
    batch = Batch()
    old = old_log_probs(same_log_probs(stock, shared, batch))
    assert shared.engine.drain().tokens_fed == 128
    assert relative(gradients(shared, batch, old), gradients(stock, batch, old)) < 1e-6


def test_a_model_that_cannot_pick_rows_gives_the_same(model):
    stock, shared = pair(model, tinker=True)
    shared.engine._picks_rows = False
    batch = Batch()
    old = old_log_probs(same_log_probs(stock, shared, batch))
    assert relative(gradients(shared, batch, old), gradients(stock, batch, old)) < 1e-6


def test_a_response_without_tokens_takes_nothing_from_its_group(model):
    stock, shared = pair(model, tinker=True)
    batch = Batch(sizes=(3,), prompt_lens=(20,))
    for column in (batch.responses, batch.masks, batch.advantages):
        column[1] = column[1][:0]
    old = old_log_probs(same_log_probs(stock, shared, batch))
    assert relative(gradients(shared, batch, old), gradients(stock, batch, old)) < 1e-6


def test_lora_adapters_get_verls_gradient(model):
    stock, shared = pair(model, tinker=True, model_options={"lora_rank": 4, "lora_alpha": 8})
    batch = Batch()
    with torch.no_grad():
        for made in (stock, shared):
            draw = torch.Generator().manual_seed(5)
            for name, parameter in made.engine.module.named_parameters():
                if "lora" in name:  # B is zero at the start, which would hide the gradient of A
                    local = parameter.to_local()
                    local.copy_(0.1 * torch.randn(local.shape, generator=draw))
    old = old_log_probs(same_log_probs(stock, shared, batch))
    wanted = gradients(stock, batch, old)
    assert wanted
    assert all("lora" in name for name in wanted)
    assert relative(gradients(shared, batch, old), wanted) < 2e-6


def test_half_precision_passes_the_first_use_check(model):
    stock, shared = pair(model, engine_options={"mixed_precision": None})  # verl's default: bfloat16
    batch = Batch()
    assert furthest(infer(shared, batch)[0], infer(stock, batch)[0]) < 0.1
    assert shared.engine._checked


def test_the_first_use_check_catches_a_dropped_mask(model):
    _, shared = pair(model, PlainCausal())
    with pytest.raises(EqualityViolated, match="isn't shared-prompt attention"):
        infer(shared, Batch())


def test_the_first_use_check_catches_positions_that_do_not_restart(model, monkeypatch):
    _, shared = pair(model)
    build = packing.PackedRow.build

    def running_on(rows, device, padding=0):
        row = build(rows, device, padding)
        return replace(row, plan=replace(row.plan, position_ids=torch.arange(row.plan.tokens)))

    monkeypatch.setattr(packing.PackedRow, "build", running_on)
    with pytest.raises(EqualityViolated, match="separate rows"):
        infer(shared, Batch())


def test_a_layer_that_goes_round_the_interface_stops_the_run(model):
    _, shared = pair(model)
    layer = shared.engine._base.model.layers[1].self_attn
    own = layer.forward
    layer.forward = lambda *args, **kwargs: own(*args, **{k: v for k, v in kwargs.items() if k != fsdp_engine.NAME})
    with pytest.raises(ConfigurationError, match="1 of 2 layers"):
        infer(shared, Batch())


def test_what_reads_whole_logits_takes_verls_own_path_with_one_warning(model, caplog):
    stock, shared = pair(model)
    batch = Batch()
    data = {"compute_loss": False, "calculate_sum_pi_squared": True}
    with caplog.at_level(logging.WARNING, "metronome_verl.fsdp_engine"):
        wanted, found = (made.infer_batch(batch.data(**data)) for made in (stock, shared))
        shared.infer_batch(batch.data(**data))
    for key in ("log_probs", "entropy", "sum_pi_squared"):
        assert torch.equal(found[key].values(), wanted[key].values())
    assert [record.getMessage().count("calculate_sum_pi_squared") for record in caplog.records] == [1]
    assert shared.engine.drain() == fsdp_engine.Counts(passed_through=2)
    same_log_probs(stock, shared, batch)  # and the next batch is shared again
    assert shared.engine.drain().attention_calls == 2


def test_a_step_on_verls_own_path_has_verls_gradient_with_checkpointing(model):
    stock, shared = pair(model, tinker=True, checkpointing=True)
    batch = Batch()
    old = old_log_probs(infer(stock, batch)[0])
    infer(shared, batch)
    found = gradients(shared, batch, old, calculate_sum_pi_squared=True)
    assert relative(found, gradients(stock, batch, old)) < 1e-7
    assert shared.engine.drain().passed_through == 1


@pytest.mark.parametrize(
    "flag", ["distillation_use_topk", "distillation_only", "calculate_sum_pi_squared", "enable_routing_replay"]
)
def test_flags_that_need_separate_rows_are_named(flag):
    assert why_separate(Batch().data()) is None
    assert why_separate(Batch().data(**{flag: True}))


def test_data_that_needs_separate_rows_is_named():
    batch = Batch(sizes=(2,), prompt_lens=(5,))
    shifted = harness.nested([torch.arange(1, 6 + len(row)) for row in batch.responses])
    assert "count from 0" in why_separate(batch.data(position_ids=shifted))
    several = harness.nested([torch.zeros(4, 5 + len(row), dtype=torch.int64).T for row in batch.responses])
    assert "several dimensions" in why_separate(batch.data(position_ids=several))
    assert "prompt and response" in why_separate(batch.data(responses=harness.nested([torch.ones(2)] * 2)))
    data = batch.data()
    del data["prompts"]
    assert "prompts and responses" in why_separate(data)
    data = batch.data()
    data["multi_modal_inputs"] = harness.NonTensorStack({}, {"pixel_values": torch.ones(1)})
    assert why_separate(data) == "multi-modal inputs"
    data["multi_modal_inputs"] = harness.NonTensorStack({}, {})
    assert why_separate(data) is None


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"engine_options": {"ulysses_sequence_parallel_size": 2}}, "Ulysses"),
        ({"model_options": {"use_fused_kernels": True}}, "fused kernels"),
        ({"model_options": {"override_config": DROPOUT}}, "dropout"),
    ],
)
def test_what_can_never_share_is_refused_at_the_start(model, options, found):
    with engine.building(SharedPromptAttention()), pytest.raises(ConfigurationError, match=found):
        worker(model, **options)


def test_our_engine_is_chosen_inside_building_only(model, monkeypatch):
    def chosen():
        return [EngineRegistry.get_engine_cls("language_model", strategy) for strategy in STRATEGIES]

    engine.register()
    engine.register()
    assert chosen() == [FSDPEngineWithLMHead] * 2
    with engine.building(SharedPromptAttention()) as made:
        assert chosen() == [fsdp_engine.SharedPromptEngine] * 2
        assert EngineRegistry.get_engine_cls("value_model", "fsdp2") is not fsdp_engine.SharedPromptEngine
    assert made == []
    with pytest.raises(ConfigurationError, match="dropout"), engine.building(SharedPromptAttention()):
        worker(model, model_options={"override_config": DROPOUT})
    assert chosen() == [FSDPEngineWithLMHead] * 2
    assert "VERL_ENGINE_VENDOR" not in os.environ
    assert type(worker(model).engine) is FSDPEngineWithLMHead
    monkeypatch.setenv("VERL_ENGINE_VENDOR", engine.VENDOR)
    with pytest.raises(ConfigurationError, match="unset VERL_ENGINE_VENDOR"):
        worker(model)
    with pytest.raises(ConfigurationError, match="doesn't share prompts"), engine.building(HostAttention()):
        pass


def test_the_models_saved_configuration_does_not_name_our_attention(model, tmp_path):
    _, shared = pair(model)
    shared.engine._base.config.save_pretrained(tmp_path)
    assert fsdp_engine.NAME not in (tmp_path / "config.json").read_text()


def test_two_ranks_give_the_gradient_of_one(model, tmp_path):
    batch = Batch(sizes=(4, 3, 1), prompt_lens=(20, 12, 30), longest=9)
    rows = [[0, 1, 2, 3], [4, 5, 6, 7]]  # 47 tokens in one micro-batch, and 73 in two
    port = harness.free_port()
    torch.multiprocessing.spawn(
        harness.rank_gradients, args=(2, port, model, tmp_path, batch, rows), nprocs=2, join=True
    )
    found, others = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(2))
    assert found[1].micro_batches == others[1].micro_batches == 2  # as many as the rank that needs more
    assert found[2]
    assert others[2]
    old = [torch.full((len(row),), -4.5) for row in batch.responses]
    wanted = gradients(worker(model, tinker=True), batch, old)
    for one in (found[0], others[0]):
        assert relative(one, wanted) < 1e-6
