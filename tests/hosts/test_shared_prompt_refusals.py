"""Models that shared rows can't serve are refused before anything runs, each with its own reason."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from metronome.errors import ConfigurationError  # noqa: E402
from metronome.shared_prompt.cascade import CascadeBackend  # noqa: E402
from metronome.shared_prompt.host import HostAttention  # noqa: E402
from metronome.shared_prompt.huggingface import attach  # noqa: E402
from metronome.shared_prompt.plan import SharedPromptPlan  # noqa: E402

TINY = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64}
WITHOUT_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
REFUSED = {
    "mamba": ({}, "linear_attention"),
    "falcon_h1": ({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}, "hybrid"),
    "qwen3_next": (
        {
            "head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "linear_attention",
    ),
    "llama": ({"ssm_state_size": 16}, "state-space"),
    "bloom": ({"n_layer": 2, "n_head": 4}, "AttentionInterface"),
    "gemma2": ({"head_dim": 8, "attn_logit_softcapping": 50.0}, "softcapping"),
    "gpt2": (GPT2, "pdrop is 0.1"),
    "gpt2 residual": ({**GPT2, **WITHOUT_DROPOUT, "resid_pdrop": 0.1}, "resid_pdrop is 0.1"),
    "opt": ({"dropout": 0.1, "ffn_dim": 32, "word_embed_proj_dim": 32}, "dropout is 0.1"),
    "opt layers": ({"dropout": 0.0, "layerdrop": 0.2, "ffn_dim": 32, "word_embed_proj_dim": 32}, "layerdrop is 0.2"),
    "mixtral": ({"num_local_experts": 2, "router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
    "dbrx": (
        {
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 2, "moe_top_k": 1, "moe_jitter_eps": 0.01},
        },
        "moe_jitter_eps is 0.01",
    ),
    "phimoe": ({"num_local_experts": 2, "router_jitter_noise": 0.0}, "samples experts in training"),
    "doge": ({"hidden_dropout": 0.0}, "mask of their own"),
    "gemma3_text": (
        {
            "head_dim": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                "full_attention": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
            },
        },
        "dynamic rotary",
    ),
    "llama factor": ({"output_multiplier": 2.0}, "output_multiplier is 2.0"),
    "hyperclovax": ({"logits_scaling": 0.5}, "logits_scaling is 0.5"),
    "bert": (
        {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "more than one output layer",
    ),
    "llama4_text": (
        {"attention_chunk_size": None, "layer_types": ["full_attention"] * 2, "intermediate_size_mlp": 32},
        "get_decoder",
    ),
    "qwen3_moe": (
        {
            "head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
            "output_router_logits": True,
        },
        "router losses",
    ),
}


def build(kind, changes, auto=transformers.AutoModelForCausalLM):
    config = transformers.AutoConfig.for_model(kind.split()[0], **{**TINY, **changes})
    return auto.from_config(config)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_that_would_be_silently_wrong_is_refused_with_its_reason(kind):
    changes, reason = REFUSED[kind]
    model = build(kind, changes)
    before = model.config._attn_implementation
    with pytest.raises(ConfigurationError, match=reason) as error:
        attach(model, CascadeBackend())
    assert error.value.remedy
    assert model.config._attn_implementation == before


def test_an_encoder_decoder_is_refused():
    changes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4, "dropout_rate": 0.0}
    model = build("t5", changes, transformers.AutoModelForSeq2SeqLM)
    with pytest.raises(ConfigurationError, match="encoder-decoder"):
        attach(model, CascadeBackend())


def test_dropout_that_only_a_module_still_holds_is_refused():
    model = build("opt", {"dropout": 0.1, "ffn_dim": 32, "word_embed_proj_dim": 32})
    model.config.dropout = 0.0  # too late: the layers hold their own copy
    with pytest.raises(ConfigurationError, match=r"OPTDecoder has dropout = 0\.1"):
        attach(model, CascadeBackend())


def test_dropout_of_parts_that_a_row_does_not_reach_is_no_reason():
    model = build("gpt_neox", {"classifier_dropout": 0.1})
    plan = SharedPromptPlan.build([(5, [3, 2])])
    assert torch.isfinite(attach(model, CascadeBackend()).log_probs(torch.arange(3, 13), plan)[0]).all()


def test_a_model_is_served_once_the_refused_setting_is_gone():
    model = build("gpt2", {**GPT2, **WITHOUT_DROPOUT})
    plan = SharedPromptPlan.build([(5, [3, 2])])
    found, _ = attach(model, CascadeBackend()).log_probs(torch.arange(3, 13), plan)
    assert torch.isfinite(found).all()


def test_a_layer_that_goes_round_the_interface_is_noticed_at_first_use():
    model = build("llama", {})
    own = model.model.layers[1].self_attn
    own.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
    shared = attach(model, CascadeBackend())
    with pytest.raises(ConfigurationError, match="1 of 2 layers"):
        shared.hidden_states(torch.arange(3, 13), SharedPromptPlan.build([(5, [3, 2])]))


def test_a_window_that_stays_in_the_mask_is_noticed_at_first_use():
    model = build("mistral", {"head_dim": 8, "sliding_window": 4})
    model.config.layer_types = ["sliding_attention", "full_attention"]
    model.config.sliding_window = None  # layers no longer tell their window
    shared = attach(model, CascadeBackend())
    with pytest.raises(ConfigurationError, match="0 of 1 sliding-window layers"):
        shared.hidden_states(torch.arange(3, 13), SharedPromptPlan.build([(5, [3, 2])]))


def test_attention_that_is_not_causal_is_refused_at_first_use():
    model = build("llama", {})
    shared = attach(model, CascadeBackend())
    row, plan = torch.arange(3, 13), SharedPromptPlan.build([(5, [3, 2])])
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ConfigurationError, match=r"isn't causal.*attention: host"):
        shared.hidden_states(row, plan)
    model.model.layers[1].self_attn.is_causal = True
    assert torch.isfinite(shared.hidden_states(row, plan)).all()


def test_adapters_that_drop_or_shift_are_refused():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.05)
    with pytest.raises(ConfigurationError, match="lora_dropout"):
        attach(peft.get_peft_model(build("llama", {}), lora), CascadeBackend())
    virtual = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ConfigurationError, match="virtual tokens"):
        attach(peft.get_peft_model(build("llama", {}), virtual), CascadeBackend())


def test_a_backend_that_shares_nothing_is_refused():
    with pytest.raises(ConfigurationError, match="attention: shared_prompt"):
        attach(build("llama", {}), HostAttention())
