"""Whole Hugging Face models in float64: log-probs and every parameter gradient against separate rows.

Norms and rotary tables of these models compute in float32 inside, so gradients are held to 1e-6 relative.
"""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")

from metronome.errors import ConfigurationError, EqualityViolated  # noqa: E402
from metronome.shared_prompt.cascade import CascadeBackend  # noqa: E402
from metronome.shared_prompt.huggingface import attach  # noqa: E402
from metronome.shared_prompt.interface import NAME, placeholder_mask  # noqa: E402
from metronome.shared_prompt.options import SharedPromptOptions  # noqa: E402
from metronome.shared_prompt.plan import SharedPromptPlan  # noqa: E402
from metronome.shared_prompt.reference import ReferenceBackend  # noqa: E402
from metronome.shared_prompt.select import SharedPromptAttention  # noqa: E402
from metronome.shared_prompt.selfcheck import check_log_probs  # noqa: E402

VOCABULARY, PROMPT, LENGTHS = 97, 30, (9, 5, 0, 14, 1, 9)
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {"head_dim": 12, "sliding_window": 16}
MODELS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 12},
    "mistral": SLIDING,
    "gemma3_text": {
        **SLIDING,
        "query_pre_attn_scalar": 12,
        "layer_types": ["sliding_attention", "full_attention"],
        "final_logit_softcapping": 5.0,
    },
    "cohere": {"logit_scale": 3.0},
    "granite": {"logits_scaling": 0.25},
}
UNCHECKED = SharedPromptOptions(self_check=False)


def build(kind, dtype=torch.float64, **changes):
    config = transformers.AutoConfig.for_model(kind, **{**TINY, **MODELS.get(kind, {}), **changes})
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.08)
    return model.to(dtype).train()


def group(lengths=LENGTHS, prompt=PROMPT, seed=0):
    draw = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(3, VOCABULARY, (length,), generator=draw) for length in (prompt, *lengths)]
    tokens[0][7] = TINY["pad_token_id"]  # a prompt token that equals the pad id is a real token
    return tokens[0], tokens[1:]


def separate(model, prompt, responses):
    """Log-probs of each response from a row of its own, through the model's unchanged forward."""
    found = []
    for response in responses:
        logits = model(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0]
        log_probs = torch.log_softmax(logits, -1)[len(prompt) - 1 : len(prompt) - 1 + len(response)]
        found.append(log_probs.gather(1, response[:, None])[:, 0])
    return torch.cat(found)


def gradients(model, log_probs):
    model.zero_grad()
    weights = torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    (log_probs * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative(found, wanted):
    assert found.keys() == wanted.keys()
    return max(
        ((found[name] - wanted[name]).abs().max() / wanted[name].abs().max().clamp_min(1e-12)).item() for name in wanted
    )


@pytest.mark.parametrize("kind, key", [("cohere", "logit_scale"), ("granite", "logits_scaling")])
def test_a_scale_of_the_logits_that_is_left_out_would_be_noticed(kind, key):
    model = build(kind)
    prompt, responses = group()
    plan, ids = SharedPromptPlan.build([(PROMPT, LENGTHS)]), torch.cat([prompt, *responses])
    wanted = separate(model, prompt, responses)
    shared = attach(model, CascadeBackend(), UNCHECKED)
    assert (shared.log_probs(ids, plan)[0] - wanted).abs().max() < 1e-12
    shared.detach()
    setattr(model.config, key, 1.0)  # the model keeps its own factor, head_of reads this one
    assert (attach(model, CascadeBackend(), UNCHECKED).log_probs(ids, plan)[0] - wanted).abs().max() > 1e-2


def test_entropies_and_their_gradient_equal_those_of_separate_rows():
    model = build("qwen3")
    prompt, responses = group()
    found = []
    for response in responses:
        logits = model(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0]
        rows = torch.log_softmax(logits[len(prompt) - 1 : len(prompt) - 1 + len(response)] / 0.7, -1)
        found.append(-(rows.exp() * rows).sum(-1))
    wanted = torch.cat(found)
    wanted_gradients = gradients(model, wanted)
    shared = attach(model, CascadeBackend(), UNCHECKED)
    plan, ids = SharedPromptPlan.build([(PROMPT, LENGTHS)]), torch.cat([prompt, *responses])
    log_probs, entropies = shared.log_probs(ids, plan, temperature=0.7, entropy=True)
    assert (entropies - wanted).abs().max() < 1e-12
    assert relative(gradients(model, entropies), wanted_gradients) < 1e-6
    log_probs, _ = shared.log_probs(ids, plan, temperature=0.7)
    assert relative(gradients(model, log_probs), wanted_gradients) > 1e-2  # another quantity's gradient


def test_a_backend_s_own_options_are_taken_only_if_they_are_ours():
    backend = CascadeBackend()
    backend.options = {"self_check": "a third party's"}
    prompt, responses = group()
    plan, ids = SharedPromptPlan.build([(PROMPT, LENGTHS)]), torch.cat([prompt, *responses])
    assert attach(build("llama"), backend).log_probs(ids, plan)[0].shape == (sum(LENGTHS),)
    faulty = Faulty("drops the mask")
    faulty.options = UNCHECKED
    attach(build("llama"), faulty).log_probs(ids, plan)  # ours: the check is off


@pytest.mark.parametrize("backend", [CascadeBackend(), ReferenceBackend()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("kind", MODELS)
def test_log_probs_and_every_gradient_equal_separate_rows(kind, backend):
    model = build(kind)
    prompt, responses = group()
    wanted = separate(model, prompt, responses)
    wanted_gradients = gradients(model, wanted)
    shared = attach(model, backend)
    plan = SharedPromptPlan.build([(PROMPT, LENGTHS)], pad_to=75)
    ids = torch.cat([prompt, *responses, torch.zeros(75 - plan.tokens_shared, dtype=torch.int64)])
    found, _ = shared.log_probs(ids, plan)
    assert found.dtype == torch.float64
    assert (found - wanted).abs().max() < 1e-12
    assert relative(gradients(model, found), wanted_gradients) < 1e-6
    assert shared.calls > 0


def test_the_float32_islands_that_bound_gradients_are_in_the_models_not_in_attention():
    model = build("llama")
    rotary = model.model.rotary_emb(torch.zeros(1, 3, 48, dtype=torch.float64), torch.arange(3)[None])[0]
    assert torch.equal(rotary, rotary.float().double())  # cosines carry float32 precision only
    row = torch.randn(3, 48, dtype=torch.float64)
    normed = model.model.norm(row)
    exact = row * torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + model.model.norm.variance_epsilon)
    assert 1e-10 < (normed - exact).abs().max() < 1e-5


def test_several_groups_in_a_row_equal_their_separate_rows():
    model = build("qwen2")
    groups = [group((4, 7), 9, 1), group((3,), 12, 2), group((0, 5, 5), 8, 3)]
    wanted = torch.cat([separate(model, *one) for one in groups])
    plan = SharedPromptPlan.build([(len(prompt), [len(r) for r in responses]) for prompt, responses in groups])
    ids = torch.cat([token for prompt, responses in groups for token in (prompt, *responses)])
    found, _ = attach(model, SharedPromptAttention()).log_probs(ids, plan)
    assert (found - wanted).abs().max() < 1e-12


def test_first_tokens_of_all_responses_come_from_one_row():
    model = build("llama")
    prompt, responses = group((3, 3, 2))
    plan = SharedPromptPlan.build([(PROMPT, [3, 3, 2])])
    heads = []
    hook = model.lm_head.register_forward_hook(lambda _module, inputs, _output: heads.append(len(inputs[0])))
    shared = attach(model, CascadeBackend(), UNCHECKED)
    found, entropies = shared.log_probs(torch.cat([prompt, *responses]), plan, temperature=0.7, entropy=True)
    hook.remove()
    assert heads == [1 + 2 + 2 + 1]  # the last prompt row once, then all but the last token of each response
    shared.detach()
    last = torch.log_softmax(model(input_ids=prompt[None], use_cache=False).logits[0, -1] / 0.7, -1)
    for place, response in zip((0, 3, 6), responses, strict=True):
        assert abs(found[place] - last[response[0]]) < 1e-12
        assert abs(entropies[place] + (last.exp() * last).sum()) < 1e-12


def test_blocks_of_label_rows_change_neither_values_nor_gradients(monkeypatch):
    model = build("llama")
    prompt, responses = group()
    plan, ids = SharedPromptPlan.build([(PROMPT, LENGTHS)]), torch.cat([prompt, *responses])
    shared = attach(model, CascadeBackend(), UNCHECKED)
    whole = shared.log_probs(ids, plan, entropy=True)
    whole_gradients = gradients(model, whole[0] + whole[1])
    monkeypatch.setattr("metronome.shared_prompt.logits._BLOCK_BYTES", 5 * VOCABULARY * 8)
    blocks = shared.log_probs(ids, plan, entropy=True)
    assert all(torch.allclose(one, other, rtol=0, atol=1e-14) for one, other in zip(whole, blocks, strict=True))
    assert relative(gradients(model, blocks[0] + blocks[1]), whole_gradients) < 1e-12


def test_a_row_of_empty_responses_has_no_log_probs_and_a_backward_pass():
    model = build("llama")
    shared = attach(model, CascadeBackend())
    found, entropies = shared.log_probs(group(())[0], SharedPromptPlan.build([(PROMPT, [0, 0])]), entropy=True)
    assert found.shape == entropies.shape == (0,)
    found.sum().backward()


class Counting(CascadeBackend):
    """A cascade that counts its calls and notes their dtypes."""

    def __init__(self):
        self.attended, self.dtypes = 0, set()

    def attend(self, *arguments, **options):
        self.attended += 1
        self.dtypes |= {argument.dtype for argument in arguments[:3]}
        return super().attend(*arguments, **options)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_gradient_checkpointing_changes_nothing(kind, reentrant):
    model = build(kind)
    prompt, responses = group()
    wanted = gradients(model, separate(model, prompt, responses))
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    backend = Counting()
    shared = attach(model, backend, UNCHECKED)
    found, _ = shared.log_probs(torch.cat([prompt, *responses]), SharedPromptPlan.build([(PROMPT, LENGTHS)]))
    assert backend.attended == 2
    assert relative(gradients(model, found), wanted) < 1e-6
    assert backend.attended == 4  # each layer again in the backward pass
    assert shared.calls == 2


def test_lora_adapters_train_through_shared_rows():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], init_lora_weights=False)
    torch.manual_seed(3)
    model = peft.get_peft_model(build("llama"), config).double()
    prompt, responses = group()
    wanted = separate(model, prompt, responses)
    wanted_gradients = gradients(model, wanted)
    assert wanted_gradients
    assert all("lora" in name for name in wanted_gradients)
    shared = attach(model, SharedPromptAttention())
    plan, ids = SharedPromptPlan.build([(PROMPT, LENGTHS)]), torch.cat([prompt, *responses])
    found, _ = shared.log_probs(ids, plan)
    assert (found - wanted).abs().max() < 1e-12
    assert relative(gradients(model, found), wanted_gradients) < 1e-6
    with model.disable_adapter(), torch.no_grad():
        frozen, _ = shared.log_probs(ids, plan)
    assert (frozen - wanted).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_autocast_computes_attention_in_half_precision_and_passes_the_check(kind):
    model = build(kind, torch.float32)
    prompt, responses = group()
    plan, ids = SharedPromptPlan.build([(PROMPT, LENGTHS)]), torch.cat([prompt, *responses])
    exact = separate(model, prompt, responses)
    backend = Counting()
    shared = attach(model, backend)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = shared.log_probs(ids, plan)
    found.sum().backward()
    assert backend.dtypes == {torch.bfloat16}
    assert found.dtype == torch.float32
    assert 1e-5 < (found - exact).abs().max() < 0.1


def test_the_half_precision_tolerance_still_sees_a_prompt_that_is_lost():
    model = build("llama", torch.bfloat16)
    prompt, responses = group()
    wanted = separate(model, prompt, responses)
    ids = torch.cat([prompt, *responses])
    found, _ = attach(model, CascadeBackend()).log_probs(ids, SharedPromptPlan.build([(PROMPT, LENGTHS)]))
    check_log_probs(found, wanted, torch.bfloat16, None)
    lost = separate(model, prompt[-1:], responses)
    with pytest.raises(EqualityViolated):
        check_log_probs(lost, wanted, torch.bfloat16, None)


def test_rows_without_a_layout_go_through_unchanged_and_detach_restores():
    model = build("mistral")
    prompt, _ = group()
    ids = torch.stack([prompt, prompt.flip(0)])
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    before = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    shared = attach(model, CascadeBackend())
    assert model.config._attn_implementation == NAME
    assert torch.equal(model(input_ids=ids, attention_mask=mask, use_cache=False).logits, before)
    sampled = model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    shared.detach()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(sampled, model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False))
    with pytest.raises(ConfigurationError, match="attach it again"):
        shared.hidden_states(prompt, SharedPromptPlan.build([(PROMPT, [0])]))


def test_a_second_handle_s_detach_leaves_a_model_of_transformers():
    model = build("llama")
    first, second = attach(model, CascadeBackend()), attach(model, CascadeBackend())
    first.detach()
    second.detach()
    assert model.config._attn_implementation == "sdpa"


def test_a_configuration_that_asks_for_tuples_is_served():
    model = build("llama", return_dict=False)
    prompt, responses = group()
    plan, ids = SharedPromptPlan.build([(PROMPT, LENGTHS)]), torch.cat([prompt, *responses])
    assert attach(model, CascadeBackend(), UNCHECKED).log_probs(ids, plan)[0].shape == (sum(LENGTHS),)


def test_sinks_and_windows_of_gpt_oss_equal_separate_rows():
    changes = {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16}
    config = transformers.AutoConfig.for_model(
        "gpt_oss", **{**TINY, **changes}, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    prompt, responses = group()
    wanted = separate(model, prompt, responses)
    shared = attach(model, CascadeBackend())
    plan, ids = SharedPromptPlan.build([(PROMPT, LENGTHS)]), torch.cat([prompt, *responses])
    found, _ = shared.log_probs(ids, plan)
    assert (found - wanted).abs().max() < 1e-4  # float32: its expert kernels take no float64
    assert (separate(model, prompt, responses) - wanted).abs().max() < 1e-4  # rows without a layout keep sinks


def test_positions_that_do_not_restart_and_a_plain_mask_are_caught_as_different():
    model = build("llama")
    prompt, responses = group()
    wanted = separate(model, prompt, responses)
    plan, ids = SharedPromptPlan.build([(PROMPT, LENGTHS)]), torch.cat([prompt, *responses])
    shared = attach(model, CascadeBackend(), UNCHECKED)
    right, _ = shared.log_probs(ids, plan)
    assert (right - wanted).abs().max() < 1e-12
    running = copy.copy(plan)
    object.__setattr__(running, "position_ids", torch.arange(plan.tokens))
    assert (shared.log_probs(ids, running)[0] - wanted).abs().max() > 1e-3
    shared.detach()
    logits = model(input_ids=ids[None], position_ids=plan.position_ids[None], use_cache=False).logits[0]
    packed = torch.log_softmax(logits[plan.label_rows], -1).gather(1, ids[plan.response_index, None])[:, 0]
    assert (packed - wanted).abs().max() > 1e-2  # transformers takes restarted positions for separate rows


class Faulty(CascadeBackend):
    """A cascade with one fault."""

    def __init__(self, fault):
        self.name, self.fault = fault, fault

    def attend(self, q, k, v, plan, scale, *, window=None, sinks=None):
        if self.fault == "drops the mask":
            plan = SharedPromptPlan.build([(plan.tokens, [0])])
        if self.fault == "ignores the window":
            window = None
        if self.fault == "loses a gradient":
            v = v.detach()
        if self.fault == "truncates long rows" and plan.tokens > 60:
            keep = torch.arange(plan.tokens, device=q.device)[:, None, None] < 60
            return super().attend(q, k, v, plan, scale, window=window, sinks=sinks) * keep
        return super().attend(q, k, v, plan, scale, window=window, sinks=sinks)


@pytest.mark.parametrize("fault", ["drops the mask", "ignores the window", "loses a gradient", "truncates long rows"])
def test_the_first_use_check_stops_a_faulty_backend(fault):
    model = build("mistral")
    prompt, responses = group()
    plan, ids = SharedPromptPlan.build([(PROMPT, LENGTHS)]), torch.cat([prompt, *responses])
    shared = attach(model, Faulty(fault))
    with pytest.raises(EqualityViolated, match=fault):
        shared.log_probs(ids, plan)
    unchecked = attach(build("mistral"), Faulty(fault), UNCHECKED)
    unchecked.log_probs(ids, plan)  # turned off by name, it says nothing


def test_the_first_use_check_compares_the_model_with_separate_rows(monkeypatch):
    model = build("llama")
    prompt, responses = group()
    plan, ids = SharedPromptPlan.build([(PROMPT, LENGTHS)]), torch.cat([prompt, *responses])
    before = model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda x: before(x) * (1 + 1e-3 * (x.dim() == 2)))
    shared = attach(model, CascadeBackend())
    with pytest.raises(EqualityViolated, match=r"separate rows.*self_check_tolerance"):
        shared.log_probs(ids, plan)
    loose = attach(model, CascadeBackend(), SharedPromptOptions(self_check_tolerance=1.0))
    loose.log_probs(ids, plan)


def test_a_row_that_does_not_fit_its_plan_is_refused():
    shared = attach(build("llama"), CascadeBackend(), UNCHECKED)
    with pytest.raises(ConfigurationError, match="as long as its plan"):
        shared.hidden_states(torch.ones(5, dtype=torch.int64), SharedPromptPlan.build([(4, [2])]))


def test_the_placeholder_mask_holds_one_element():
    mask = placeholder_mask(1000, torch.device("cpu"))
    assert mask.shape == (1, 1, 1000, 1000)
    assert mask.untyped_storage().nbytes() == 1
