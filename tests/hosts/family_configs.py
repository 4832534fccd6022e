"""The tiny configurations of ``model_families.py``: families that shared rows serve, and families that they don't."""

import dataclasses

VOCABULARY, LAYERS, WINDOW = 99, 4, 8
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 12,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8,
    "word_embed_proj_dim": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What a family's configuration knows of these is set; multi-head latent attention (MLA) has Dv 12 and Dq 16."""
FLOAT64 = (1e-9, 1e-6)  # largest difference of log-probs, and of a gradient relative to its parameter's largest
SINGLE = (1e-5, 1e-5)  # the same where the model's own attention or router computes in float32
FLOAT32 = 3e-6  # largest difference of log-probs and gradients, relative to the model's largest


@dataclasses.dataclass(frozen=True)
class Family:
    """One configuration: ``model_type[, variant]``, what it stands for, and what it sets on top of ``TINY``."""

    name: str
    kind: str
    changes: dict = dataclasses.field(default_factory=dict)
    vision: dict | None = None  # not None: a wrapper that also reads images
    text_type: str = ""
    own: dict = dataclasses.field(default_factory=dict)  # the wrapper's own settings
    single: bool = False
    float32: float = FLOAT32


MIXED = {"layer_types": ["sliding_attention", "full_attention"] * 2}
LATENT = {"num_key_value_heads": 4, "head_dim": 8}
ROTARY_3D = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}}
IMAGE = {"image_token_id": 90}
QWEN = {**IMAGE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
POSITION_SCALE = {"original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}
LONG = {"short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "original_max_position_embeddings": 50}
BLOCKS = {"index_block_size": 4, "index_topk_blocks": 2}
BERT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def _rotary(kind, **others):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **others}}


SERVED = [
    *(Family(name, "dense") for name in ("llama", "qwen2", "qwen3", "gemma", "olmo", "olmo2", "arcee", "helium")),
    *(Family(name, "dense") for name in ("hunyuan_v1_dense", "ernie4_5", "granite", "cohere", "hyperclovax")),
    *(Family(name, "dense") for name in ("bitnet", "nanochat")),
    Family("llama, yarn", "dense, scaled rotary", _rotary("yarn", factor=4.0, original_max_position_embeddings=16)),
    Family("seed_oss", "dense", {"attention_dropout": 0.0, "residual_dropout": 0.0}),
    Family("apertus", "dense, xIELU"),
    Family("phi3", "dense"),
    Family("phi", "dense, partial rotary"),
    *(Family(name, "dense, partial rotary") for name in ("glm", "glm4", "gpt_neox")),
    Family("gptj", "dense, partial rotary", {"rotary_dim": 8, **NO_DROPOUT}),
    Family("smollm3", "dense, layers without rotary", {"no_rope_layers": [1, 1, 1, 0]}),
    Family("gpt2", "dense, absolute positions", NO_DROPOUT),
    Family("gpt_bigcode", "dense, absolute positions, one kv head", NO_DROPOUT),
    Family("opt", "dense, absolute positions", {"dropout": 0.0, "ffn_dim": 64}),
    *(Family(name, "dense, window") for name in ("mistral", "starcoder2", "ministral")),
    Family("ministral3", "dense, queries scaled by position", _rotary("yarn", factor=2.0, **POSITION_SCALE)),
    *(Family(name, "dense, window", MIXED) for name in ("gemma3_text", "olmo3", "cohere2", "exaone4")),
    Family("gemma2, softcap off", "dense, window", {**MIXED, "attn_logit_softcapping": None}, single=True),
    Family("vaultgemma, softcap off", "dense, window", {**MIXED, "attn_logit_softcapping": None}, single=True),
    Family("gemma3n_text", "dense, window, shared keys", {**MIXED, "num_kv_shared_layers": 2, "laurel_rank": 4}),
    Family(
        "gemma4_text",
        "dense, window, shared keys, two widths",
        {**MIXED, "num_kv_shared_layers": 2, "global_head_dim": 24},
        float32=1e-5,  # its separate rows in float32 are as far (7e-6) from those in float64 here
    ),
    Family("granite_swa", "dense, window, sinks", MIXED, single=True),
    *(Family(name, "MoE") for name in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "granitemoe")),
    *(Family(name, "MoE, routing bias", single=True) for name in ("glm4_moe", "dots1", "minimax_m2", "hy_v3")),
    Family("ernie4_5_moe", "MoE, routing bias", {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1}),
    Family("hunyuan_v1_moe", "MoE", {"moe_topk": 2}),
    Family("jetmoe", "MoE, also in attention", {"kv_channels": 12}),
    Family("afmoe", "MoE, window, gated", {**MIXED, "num_dense_layers": 1}, single=True),
    Family("gpt_oss", "MoE, window, sinks", MIXED),
    Family("deepseek_v2", "MoE, MLA", LATENT),
    *(Family(name, "MoE, MLA, routing bias", LATENT, single=True) for name in ("deepseek_v3", "glm4_moe_lite")),
    *(Family(name, "dense, MLA", LATENT) for name in ("minicpm3", "youtu")),
    Family("qwen2_vl", "image wrapper, 3-D rotary", ROTARY_3D, vision={}, own=QWEN),
    Family("qwen2_5_vl", "image wrapper, 3-D rotary", ROTARY_3D, vision={}, own=QWEN),
    Family("qwen3_vl", "image wrapper, 3-D rotary", ROTARY_3D, vision={"deepstack_visual_indexes": [0]}, own=QWEN),
    Family("gemma3", "image wrapper, window", MIXED, vision={}, own={"image_token_index": 90}),
    Family("llava", "image wrapper", vision={}, text_type="llama", own={"image_token_index": 90}),
    Family("mistral3", "image wrapper, window", vision={}, text_type="mistral", own={"image_token_index": 90}),
    Family("smolvlm", "image wrapper", vision={}, text_type="llama", own=IMAGE),
]
REFUSED = [
    Family("qwen3_next", "linear attention, MoE", LINEAR),
    Family("qwen3_5_text", "linear attention", LINEAR),
    Family("minimax", "linear attention, MoE"),
    Family("kimi_linear", "linear attention, MoE"),
    Family("olmo_hybrid", "linear attention", LINEAR),
    Family("mamba", "state space", {"state_size": 8}),
    Family("mamba2", "state space", {"num_heads": 12, "head_dim": 8, "state_size": 8, "n_groups": 1}),
    Family("falcon_h1", "state space and attention", {"mamba_d_ssm": 96, "mamba_n_heads": 4, "mamba_d_head": 24}),
    Family("jamba", "state space and attention, MoE", {"mamba_d_state": 8}),
    Family("bamba", "state space and attention", {"mamba_n_heads": 4, "mamba_d_head": 24, "mamba_d_state": 8}),
    Family("nemotron_h", "state space and attention", {"mamba_num_heads": 4, "mamba_head_dim": 24}),
    Family("zamba2", "state space and attention", {"layers_block_type": ["mamba", "hybrid"] * 2}),
    Family("granitemoehybrid", "state space and attention, MoE", {"mamba_n_heads": 4, "mamba_d_head": 24}),
    Family("recurrent_gemma", "recurrent and attention"),
    Family("rwkv", "recurrent"),
    Family("xlstm", "recurrent", {"num_heads": 4}),
    Family("lfm2", "convolution and attention", {"layer_types": ["conv", "full_attention"] * 2}),
    Family("zaya", "convolution in attention, MoE", {"num_experts_per_tok": 1}),
    Family("llama4_text", "chunked attention, MoE", {"intermediate_size_mlp": 64}),
    Family(
        "llama4_text, not chunked",
        "MoE",
        {"attention_chunk_size": None, "layer_types": ["full_attention"] * 4, "intermediate_size_mlp": 64},
    ),
    Family("deepseek_v32", "sparse attention, MoE, MLA", {**LATENT, "index_topk": 8, "index_n_heads": 2}),
    Family("deepseek_v4", "compressed attention, MoE"),
    Family("minimax_m3_vl_text", "sparse attention, MoE", {"layer_types": ["minimax_m3_sparse"] * 4, **BLOCKS}),
    Family("doge", "mask computed from values"),
    Family("diffllama", "two attentions a layer"),
    Family("gemma2", "dense, window, softcap", MIXED),
    Family("bloom", "ALiBi, own attention", {"hidden_dropout": 0.0}),
    Family("mpt", "ALiBi, own attention", {"d_model": 48, "n_heads": 4, "n_layers": 4, "max_seq_len": 256}),
    Family("falcon", "own attention"),
    Family("gpt_neo", "own attention", {"attention_types": [[["global", "local"], 2]]}),
    Family("nemotron", "own attention"),
    Family("stablelm", "own attention, partial rotary", {"partial_rotary_factor": 0.5}),
    Family("t5", "encoder-decoder", {"d_model": 48, "d_kv": 12, "d_ff": 64, "num_layers": 2, "num_heads": 4}),
    Family("bert, decoder", "head of several layers", {**BERT, "is_decoder": True}),
    Family("phimoe", "MoE, sampled router", {"router_jitter_noise": 0.0}),
    Family("mixtral, jitter", "MoE, router noise", {"router_jitter_noise": 0.1}),
    Family("qwen3_moe, router loss", "MoE", {"output_router_logits": True}),
    Family("opt, dropout", "dropout that no module shows", {"dropout": 0.1, "ffn_dim": 64}),
    Family(
        "phi3, longrope",
        "rotary that looks at the row",
        {**_rotary("longrope", **LONG), "original_max_position_embeddings": 50},
    ),
    Family(
        "llama, dynamic",
        "rotary that looks at the row",
        {**_rotary("dynamic", factor=4.0), "max_position_embeddings": 50},
    ),
    Family("hyperclovax, scaled", "dense, logits multiplied", {"logits_scaling": 0.5}),
    Family(
        "paligemma", "image wrapper, prompt not causal", vision={}, text_type="gemma", own={"image_token_index": 90}
    ),
    Family(
        "mllama",
        "image wrapper, cross-attention",
        {"cross_attention_layers": [1]},
        vision={},
        own={"image_token_index": 90},
    ),
]
FAMILIES = [*SERVED, *REFUSED]
