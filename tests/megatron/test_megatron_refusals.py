"""What a GPTModel can't share is refused with the reason; a layer that goes around us is an error."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core isn't installed: requirements/megatron.txt")
import megatron.core
from cpu_room import build, row, shared
from megatron.core.transformer.attention import CrossAttention
from megatron.core.transformer.enums import AttnMaskType

from metronome.contracts import AttentionNeed
from metronome.errors import ConfigurationError, EqualityViolated
from metronome.shared_prompt.host import HostAttention
from metronome.shared_prompt.megatron import FIELD, attach_megatron, packed
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.reference import ReferenceBackend

EXPERTS = {"num_moe_experts": 4}
CONFIGURATIONS: list[tuple[dict[str, Any], str]] = [
    ({"context_parallel_size": 2}, "context parallelism"),
    ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
    ({"hidden_dropout": 0.1}, "hidden_dropout is 0.1"),
    ({"window_size": (8, 0)}, "sliding window"),
    ({"softmax_type": "learnable"}, "softmax_type learnable"),
    ({"apply_query_key_layer_scaling": True}, "splits the score factor"),
    ({"qk_clip": True}, "largest score"),
    ({"batch_invariant_mode": True}, "one order of sums"),
    ({"multi_latent_attention": True}, "MLA"),
    ({"mtp_num_layers": 1}, "MTP"),
    ({"experimental_attention_variant": "gated_delta_net"}, "one response into the next"),
    ({"is_hybrid_model": True}, "one response into the next"),
    ({"fp8": "hybrid"}, "fp8 scales"),
    ({"fp4": "e2m1"}, "fp4 scales"),
    ({"quant_recipe": object()}, "quant_recipe scales"),
    ({"use_kitchen": True}, "use_kitchen scales"),
    ({"cuda_graph_impl": "local"}, "CUDA graph"),
    ({"overlap_moe_expert_parallel_comm": True}, "doesn't call the model's forward"),
    ({"fused_single_qkv_rope": True}, "without packed_seq_params only"),
    ({"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}, "offloading core_attn"),
    (EXPERTS | {"moe_aux_loss_coeff": 0.01}, "router losses"),
    (EXPERTS | {"moe_aux_loss_coeff": [0.0, 0.01]}, "router losses"),
    (EXPERTS | {"moe_z_loss_coeff": 1e-3}, "router losses"),
    (EXPERTS | {"moe_expert_capacity_factor": 1.0}, "expert capacity"),
    (EXPERTS | {"moe_token_dropping": True}, "token dropping"),
    (EXPERTS | {"moe_router_enable_expert_bias": True}, "counts of tokens"),
    (EXPERTS | {"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
    (EXPERTS | {"moe_input_jitter_eps": 0.1}, "one noise"),
]


@pytest.mark.parametrize(("changes", "reason"), CONFIGURATIONS, ids=lambda value: str(value)[:40])
def test_configurations_are_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    model = build()
    attach_megatron(model, ReferenceBackend()).detach()  # as it is, it is served
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(ConfigurationError, match=reason):
        attach_megatron(model, ReferenceBackend())
    assert "forward" not in vars(model.decoder.layers[0].self_attention.core_attention)


@pytest.mark.parametrize("name", ["moe_aux_loss_coeff", "moe_expert_capacity_factor"])
def test_settings_of_experts_mean_nothing_without_experts(name: str) -> None:
    model = build()
    setattr(model.config, name, 0.5)
    attach_megatron(model, ReferenceBackend())


class Recurrent(torch.nn.Module):
    """A layer without self-attention, as Mamba's are."""


def test_models_are_refused_with_the_reason() -> None:
    def mrope(model: Any) -> None:
        model.position_embedding_type = "mrope"

    def recurrent(model: Any) -> None:
        model.decoder.layers[1] = Recurrent()

    def two_way(model: Any) -> None:
        model.decoder.layers[1].self_attention.attn_mask_type = AttnMaskType.no_mask

    def crossing(model: Any) -> None:
        model.extra = CrossAttention.__new__(CrossAttention)
        torch.nn.Module.__init__(model.extra)

    def other_core(model: Any) -> None:
        model.decoder.layers[1].self_attention.core_attention.forward = lambda query, key, value, mask: query

    def other_rotary(model: Any) -> None:
        model.rotary_pos_emb = torch.nn.Identity()

    for change, reason in (
        (mrope, "position_embedding_type mrope"),
        (recurrent, "Recurrent instead of SelfAttention"),
        (two_way, "isn't causal"),
        (crossing, "cross attention"),
        (other_core, "takes no packed_seq_params"),
        (other_rotary, "has no get_emb"),
    ):
        model = build()
        change(model)
        with pytest.raises(ConfigurationError, match=reason):
            attach_megatron(model, ReferenceBackend())
    with pytest.raises(ConfigurationError, match="only a GPTModel"):
        attach_megatron(torch.nn.Linear(2, 2), ReferenceBackend())


def test_an_untested_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    monkeypatch.setattr(megatron.core, "__version__", "0.14.0")
    with pytest.raises(ConfigurationError, match=r"'0\.14\.0'.*0\.16\.x or 0\.19\.x"):
        attach_megatron(model, ReferenceBackend())


def test_a_missing_megatron_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(ConfigurationError, match=r"can't be imported.*metronome-rl\[megatron\]"):
        attach_megatron(model, ReferenceBackend())


def test_a_backend_that_does_not_share_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="doesn't share prompts"):
        attach_megatron(build(), HostAttention())


def test_a_second_attach_is_refused_until_the_first_is_detached() -> None:
    model = build()
    handle = attach_megatron(model, ReferenceBackend())
    with pytest.raises(ConfigurationError, match="attached already"):
        attach_megatron(model, ReferenceBackend())
    handle.detach()
    attach_megatron(model, ReferenceBackend())


def test_rows_that_do_not_fit_are_refused() -> None:
    model = build()
    handle = attach_megatron(model, ReferenceBackend())
    ids, plan, _ = row()

    def run(form: str = "sbhd", tokens: torch.Tensor = ids, one: SharedPromptPlan = plan, **others: Any) -> None:
        given = {"packed_seq_params": packed(one, form), "attention_mask": None}
        model(input_ids=tokens, position_ids=None, **given | others)

    run()
    mask = torch.zeros(1, 1, plan.tokens, plan.tokens, dtype=torch.bool)
    with pytest.raises(ConfigurationError, match="attention_mask can't go with a plan"):
        run(attention_mask=mask)
    with pytest.raises(ConfigurationError, match="labels are gathered"):
        run(labels=ids)
    with pytest.raises(ConfigurationError, match="inference_context"):
        run(inference_context=object())
    with pytest.raises(ConfigurationError, match="as long as its plan"):
        run(tokens=ids[:, 1:])
    with pytest.raises(ConfigurationError, match="cached prompt"):
        run(one=SharedPromptPlan.build([(13, [5])], cached_prompt=True))
    with pytest.raises(ConfigurationError, match="sbhd or thd"):
        packed(plan, "bshd")
    params = packed(plan)
    params.local_cp_size = 2
    with pytest.raises(ConfigurationError, match="context parallelism"):
        run(packed_seq_params=params)
    with pytest.raises(ConfigurationError, match="must be"):
        handle.response_log_probs(torch.zeros(1, plan.tokens - 1, 96), ids, plan)
    model.config.apply_rope_fusion = True
    with pytest.raises(ConfigurationError, match="counts positions within segments"):
        run("thd")
    model.config.apply_rope_fusion = False
    model.config.sequence_parallel, model.config.tensor_model_parallel_size = True, 8
    with pytest.raises(ConfigurationError, match=r"among 8 ranks.*pad_to=96"):
        run()


def test_what_a_layer_would_drop_is_refused() -> None:
    model = build()
    attach_megatron(model, ReferenceBackend())
    _, plan, _ = row()
    core = model.decoder.layers[0].self_attention.core_attention
    q, k, v = torch.zeros(plan.tokens, 1, 4, 16), *torch.zeros(2, plan.tokens, 1, 2, 16)
    assert core(q, k, v, None, packed_seq_params=packed(plan)).shape == (plan.tokens, 1, 64)
    with pytest.raises(ConfigurationError, match="attention_bias"):
        core(q, k, v, None, attention_bias=torch.zeros(1), packed_seq_params=packed(plan))
    with pytest.raises(ConfigurationError, match="whole row"):
        core(q[1:], k[1:], v[1:], None, packed_seq_params=packed(plan))
    with pytest.raises(ConfigurationError, match="another device"):
        core(q.to("meta"), k.to("meta"), v.to("meta"), None, packed_seq_params=packed(plan))


class Unable(ReferenceBackend):
    """A backend that serves nothing."""

    def supports(self, need: AttentionNeed) -> str | None:
        return f"no heads of width {need.head_dim}"


def test_a_backend_that_can_not_serve_the_layers_is_refused() -> None:
    model = build()
    ids, plan, _ = row()
    with pytest.raises(ConfigurationError, match="no heads of width 16"):
        shared(model, attach_megatron(model, Unable()), ids, plan)


def test_layers_that_go_around_are_an_error() -> None:
    model = build()
    core = model.decoder.layers[1].self_attention.core_attention
    stock = core.forward
    handle = attach_megatron(model, ReferenceBackend())
    ids, plan, _ = row()

    def around(query: Any, key: Any, value: Any, mask: Any, **others: Any) -> Any:
        mask = torch.ones(1, 1, plan.tokens, plan.tokens, dtype=torch.bool).triu(1)
        return stock(query, key, value, mask)

    shared(model, handle, ids, plan)
    core.forward = around
    with pytest.raises(ConfigurationError, match="2 of 3 came through"):
        shared(model, handle, ids, plan)


def test_a_rotary_forward_that_others_patched_is_an_error() -> None:
    model = build()
    stock = model.rotary_pos_emb.forward
    model.rotary_pos_emb.forward = lambda *args, **kwargs: stock(*args, **kwargs) + 1
    ids, plan, _ = row()
    with pytest.raises(EqualityViolated, match="rotary table"):
        shared(model, attach_megatron(model, ReferenceBackend()), ids, plan)


class Unscaled(ReferenceBackend):
    """Ignores the score factor."""

    def attend(self, q: Any, k: Any, v: Any, plan: SharedPromptPlan, scale: float, **others: Any) -> Any:
        return super().attend(q, k, v, plan, 1.0, **others)


def test_the_first_use_checks_the_backend_once_a_kind_of_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, plan, _ = row()
    model = build()
    with pytest.raises(EqualityViolated, match="isn't shared-prompt attention"):
        shared(model, attach_megatron(model, Unscaled()), ids, plan)

    from metronome.shared_prompt import megatron as ours

    checked: list[Any] = []
    monkeypatch.setattr(ours, "check_attention", lambda backend, plan, layer, device: checked.append(layer))
    model = build()
    handle = attach_megatron(model, ReferenceBackend())
    shared(model, handle, ids, plan)
    shared(model, handle, ids, plan)
    assert [layer.heads for layer in checked] == [4]


def test_detach_gives_back_every_bit() -> None:
    model = build()
    keys = list(model.state_dict())
    ids, plan, _ = row()
    tokens, mask = ids[:, :20], torch.ones(1, 1, 20, 20, dtype=torch.bool).triu(1)

    def stock() -> torch.Tensor:
        return model(tokens, torch.arange(20)[None], mask).detach()

    before = stock()
    handle = attach_megatron([model], ReferenceBackend())
    assert list(model.state_dict()) == keys
    shared(model, handle, ids, plan)
    assert torch.equal(stock(), before)  # rows without a plan
    handle.detach()
    handle.detach()
    assert torch.equal(stock(), before)
    assert list(model.state_dict()) == keys
    assert not model._forward_pre_hooks
    assert not model._forward_hooks
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_forward_that_was_overridden_before_comes_back() -> None:
    model = build()
    core = model.decoder.layers[0].self_attention.core_attention
    stock = core.forward

    def patched(*args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Any:
        return stock(*args, **kwargs)

    core.forward = patched
    attach_megatron(model, ReferenceBackend()).detach()
    assert core.forward is patched


def test_the_plan_rides_on_packed_seq_params() -> None:
    _, plan, _ = row()
    params = packed(plan, "thd")
    assert getattr(params, FIELD) is plan
    assert params.cu_seqlens_q.tolist() == [0, 13, 18, 25, 26, 32, 41, 61, 64, 67, 70, 81, 92]
    assert params.max_seqlen_q == params.max_seqlen_kv == 20
