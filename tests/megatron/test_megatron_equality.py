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
