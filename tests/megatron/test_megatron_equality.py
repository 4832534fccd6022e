"""A GPTModel's shared row gives the log-probs and gradients of separate rows through its stock attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("megatron.core", reason="megatron-core isn't installed: requirements/megatron.txt")
from cpu_room import (
    FAR,
    GROUPS,
    RECOMPUTE,
    TOLERANCE,
    UNCHECKED,
    VOCABULARY,
    OneWrongKey,
    build,
    compared,
    furthest,
    gradients,
    recomputed,
    row,
    separately,
    shared,
)

from metronome.shared_prompt.megatron import attach_megatron, packed
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.reference import ReferenceBackend
from metronome.shared_prompt.select import backend_named


@pytest.fixture(scope="module")
def alone() -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """A model's parameters, and its log-probs and gradients from separate rows."""
    model = build()
    ids, plan, weights = row()
    log_probs = separately(model, ids, plan)
    return model.state_dict(), log_probs.detach(), gradients(model, log_probs, weights)


@pytest.mark.parametrize("backend", ["reference", "cascade"])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("form", ["sbhd", "thd"])
def test_shared_rows_equal_separate_rows(
    form: str, recompute: str, backend: str, alone: Any, record_property: Any
) -> None:
    state, wanted, wanted_gradients = alone
    model = build(**RECOMPUTE[recompute])
    model.load_state_dict(state)
    handle = attach_megatron(model, backend_named(backend))
    ids, plan, weights = row()
    checkpoints = recomputed[0]
    found = shared(model, handle, ids, plan, form)
    found_gradients = gradients(model, found, weights)
    assert recomputed[0] - checkpoints == (0 if recompute == "none" else 3)
    assert handle.calls == 3
    apart = (found - wanted).abs().max().item(), furthest(found_gradients, wanted_gradients)
    record_property("differences", apart)
    assert max(apart) <= TOLERANCE


@pytest.mark.parametrize(
    ("positions", "changes"),
    [
        ("learned_absolute", {}),
        ("none", {}),
        ("rope", {"rotary_percent": 0.5}),
        ("rope", {"rotary_interleaved": True}),
        ("rope", {"no_rope_freq": [0, 1, 0]}),
        ("rope", {"softmax_scale": 0.4}),
        ("rope", {"attention_output_gate": True}),
        ("rope", {"num_moe_experts": 4, "moe_router_topk": 2, "add_qkv_bias": False}),
        (
            "yarn",
            {
                "yarn_rotary_scaling_factor": 4.0,
                "yarn_original_max_position_embeddings": 16,
                "yarn_beta_fast": 32.0,
                "yarn_beta_slow": 1.0,
                "yarn_mscale": 1.0,
                "yarn_mscale_all_dim": 0.0,
                "yarn_correction_range_round_to_int": True,
            },
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value), "plain"),
)
@pytest.mark.parametrize("form", ["sbhd", "thd"])
def test_kinds_of_positions_and_layers_keep_the_equality(positions: str, changes: dict[str, Any], form: str) -> None:
    assert max(compared(build(positions, **changes), ReferenceBackend(), form)) <= TOLERANCE


def test_without_its_own_scale_a_core_module_gets_megatrons() -> None:
    model = build(softmax_scale=0.4)
    ids, plan, _ = row()
    wanted = separately(model, ids, plan)
    for layer in model.decoder.layers:
        del layer.self_attention.core_attention.softmax_scale
    found = shared(model, attach_megatron(model, ReferenceBackend()), ids, plan)
    assert (found - wanted).abs().max() <= TOLERANCE


def test_one_wrong_key_shows(alone: Any) -> None:
    state, wanted, wanted_gradients = alone
    model = build()
    model.load_state_dict(state)
    ids, plan, weights = row()
    found = shared(model, attach_megatron(model, OneWrongKey(), UNCHECKED), ids, plan)
    assert (found - wanted).abs().max() > FAR
    assert furthest(gradients(model, found, weights), wanted_gradients) > FAR


@pytest.mark.parametrize("positions", ["rope", "learned_absolute"])
def test_responses_that_start_at_position_0_show(positions: str) -> None:
    model = build(positions)
    ids, plan, _ = row()
    wanted = separately(model, ids, plan)
    wrong = plan.position_ids.clone()
    for group in plan.groups:
        wrong[group.prompt.end : group.end] -= group.prompt.length
    handle = attach_megatron(model, ReferenceBackend())
    found = shared(model, handle, ids, dataclasses.replace(plan, position_ids=wrong))
    assert (found - wanted).abs().max() > FAR
    assert (shared(model, handle, ids, plan) - wanted).abs().max() <= TOLERANCE


def test_without_positions_per_token_thd_rows_are_wrong_and_sbhd_rows_fail(alone: Any) -> None:
    state, wanted, _ = alone
    model = build()
    model.load_state_dict(state)
    ids, plan, _ = row()
    handle = attach_megatron(model, ReferenceBackend())
    del model.rotary_pos_emb.forward
    assert (shared(model, handle, ids, plan, "thd") - wanted).abs().max() > FAR
    with pytest.raises(RuntimeError, match="size of tensor"):
        shared(model, handle, ids, plan, "sbhd")


def test_labels_are_gathered_and_temperature_divides(alone: Any) -> None:
    model = build()
    model.load_state_dict(alone[0])
    ids, plan, _ = row()
    handle = attach_megatron(model, ReferenceBackend())
    logits = model(ids, None, None, packed_seq_params=packed(plan))
    assert logits.shape == (1, plan.tokens, VOCABULARY)
    table = (logits[0] / 0.7).log_softmax(-1)
    labels = ids[0, plan.response_index]
    found = handle.response_log_probs(logits, ids, plan, 0.7)
    assert (found - table[plan.label_rows, labels]).abs().max() <= TOLERANCE
    shifted = table[plan.response_index - 1, labels]
    firsts = plan.label_rows != plan.response_index - 1
    assert firsts.sum() == 5  # every response but the first of its group, and the empty one
    assert (found - shifted)[firsts].abs().min() > FAR


def test_half_precision_inside_megatrons_wrapper_stays_within_its_rounding() -> None:
    from megatron.core.transformer.module import Float16Module

    model = build(bf16=True, params_dtype=torch.bfloat16)
    wrapped = Float16Module(model.config, model)
    ids, plan, _ = row()
    wanted = separately(wrapped, ids, plan)
    handle = attach_megatron([wrapped], backend_named("cascade"))
    found = shared(wrapped, handle, ids, plan)
    assert handle.calls == 3
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() < 0.1
    assert (found - wanted).abs().mean() < 0.01
    handle.detach()
    wrong = shared(wrapped, attach_megatron([wrapped], OneWrongKey(), UNCHECKED), ids, plan)
    assert (wrong - wanted).abs().max() > 2 * (found - wanted).abs().max()


@pytest.mark.parametrize("form", ["sbhd", "thd"])
def test_padding_longer_than_every_sequence_has_positions_of_its_own(form: str, alone: Any) -> None:
    state, wanted, _ = alone
    model = build()
    model.load_state_dict(state)
    ids, short, _ = row()
    assert max(group.reach for group in short.groups) < 60
    plan = SharedPromptPlan.build(GROUPS, pad_to=short.tokens_shared + 60)
    longer = torch.cat([ids[:, : short.tokens_shared], torch.zeros(1, 60, dtype=torch.int64)], 1)
    found = shared(model, attach_megatron(model, ReferenceBackend()), longer, plan, form)
    assert (found - wanted).abs().max() <= TOLERANCE


def test_old_log_probs_in_inference_mode_may_come_first_and_share_the_plan_with_training(alone: Any) -> None:
    state, wanted, wanted_gradients = alone
    model = build()
    model.load_state_dict(state)
    ids, plan, weights = row()
    handle = attach_megatron(model, ReferenceBackend())
    with torch.inference_mode():
        assert (shared(model, handle, ids, plan, "thd") - wanted).abs().max() <= TOLERANCE
    found = shared(model, handle, ids, plan, "thd")
    assert furthest(gradients(model, found, weights), wanted_gradients) <= TOLERANCE


class Precise(ReferenceBackend):
    """Notes whether autocast would round what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.rounded: list[bool] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: SharedPromptPlan, scale: float, **others: Any) -> Tensor:
        self.rounded.append(torch.is_autocast_enabled(q.device.type))
        return super().attend(q, k, v, plan, scale, **others)


def test_autocast_stays_out_of_the_backend() -> None:
    model, backend = build(), Precise()
    ids, plan, _ = row()
    handle = attach_megatron(model, backend, UNCHECKED)
    with torch.autocast("cpu", torch.bfloat16):
        shared(model, handle, ids, plan)
    assert backend.rounded == [False] * 3


def test_megatrons_data_parallel_wrapper_gets_the_gradients(alone: Any) -> None:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    state, _, wanted_gradients = alone
    model = build()
    model.load_state_dict(state)
    wrapped = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
    ids, plan, weights = row()
    handle = attach_megatron(wrapped, ReferenceBackend())
    for _ in range(2):  # two micro-batches add up
        (shared(wrapped, handle, ids, plan) * weights).sum().backward()
    found = {name: value.main_grad / 2 for name, value in model.named_parameters()}
    assert furthest(found, wanted_gradients) <= TOLERANCE


def test_two_attached_models_do_not_mix(alone: Any) -> None:
    ids, plan, _ = row()
    models = [build(), build()]
    models[0].load_state_dict(alone[0])
    for parameter in models[1].parameters():
        parameter.data *= 1.1
    wanted = [separately(model, ids, plan) for model in models]
    assert (wanted[0] - wanted[1]).abs().max() > FAR
    backend = ReferenceBackend()
    handles = [attach_megatron(model, backend) for model in models]
    for model, handle, value in zip(models, handles, wanted, strict=True):
        assert (shared(model, handle, ids, plan) - value).abs().max() <= TOLERANCE


def test_a_core_module_s_own_scale_goes_before_the_configuration_s() -> None:
    model = build()
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.softmax_scale = 0.4
    assert max(compared(model, ReferenceBackend())) <= TOLERANCE


def test_logits_split_over_the_vocabulary_are_divided_by_the_temperature_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core import tensor_parallel

    def cross_entropy(rows: Tensor, tokens: Tensor) -> Tensor:
        assert rows.dtype == torch.float32
        loss = -rows.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        rows.zero_()  # as Megatron's, which writes its exponentials into its input
        return loss

    model = build()
    ids, plan, _ = row()
    handle = attach_megatron(model, ReferenceBackend())
    half, ids = VOCABULARY // 2, ids // 2  # what rank 0 of two holds
    logits = model(ids, None, None, packed_seq_params=packed(plan))[..., :half].detach().bfloat16()
    before = logits.clone()
    model.config.tensor_model_parallel_size = 2
    monkeypatch.setattr(tensor_parallel, "vocab_parallel_cross_entropy", cross_entropy)
    for temperature in (1.0, 0.7):
        found = handle.response_log_probs(logits, ids, plan, temperature)
        table = (before[0].float() / temperature).log_softmax(-1)
        assert (found - table[plan.label_rows, ids[0, plan.response_index]]).abs().max() <= TOLERANCE
    assert torch.equal(logits, before)


class Foreign(ReferenceBackend):
    """A third party's, whose ``options`` are its own affair."""

    options = ("fast", "faster")


def test_a_backend_s_options_count_only_if_they_are_ours(alone: Any) -> None:
    model = build()
    model.load_state_dict(alone[0])
    ids, plan, _ = row()
    assert (shared(model, attach_megatron(model, Foreign()), ids, plan) - alone[1]).abs().max() <= TOLERANCE
    model, wrong = build(), OneWrongKey()
    model.load_state_dict(alone[0])
    wrong.options = UNCHECKED  # else the self-check would raise
    assert (shared(model, attach_megatron(model, wrong), ids, plan) - alone[1]).abs().max() > FAR
