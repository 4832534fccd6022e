"""A prompt computed once for several response micro-batches equals separate rows, gradients included."""

import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")

from test_shared_prompt_models import (  # noqa: E402
    LENGTHS,
    MODELS,
    PROMPT,
    UNCHECKED,
    Counting,
    Faulty,
    build,
    gradients,
    group,
    relative,
    separate,
)

from metronome.errors import ConfigurationError, EqualityViolated  # noqa: E402
from metronome.shared_prompt import reuse  # noqa: E402
from metronome.shared_prompt.cascade import CascadeBackend  # noqa: E402
from metronome.shared_prompt.huggingface import attach  # noqa: E402
from metronome.shared_prompt.plan import SharedPromptPlan  # noqa: E402
from metronome.shared_prompt.reference import ReferenceBackend  # noqa: E402
from metronome.shared_prompt.select import SharedPromptAttention  # noqa: E402


def step(model, shared, prompt, responses, sizes):
    """Log-probs, and the gradient of the sum that ``gradients`` takes; ``sizes`` responses a micro-batch."""
    model.zero_grad(set_to_none=True)
    count = sum(len(one) for one in responses)
    weights = torch.randn(count, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    found, first, place = [], 0, 0
    with shared.cached_prompt(prompt) as cached:
        for size in sizes:
            part = responses[first : first + size]
            ids = torch.cat([torch.empty(0, dtype=torch.int64), *part])
            log_probs, _ = cached.log_probs(ids, [len(one) for one in part])
            own = slice(place, place + len(ids))
            (log_probs * weights[own]).sum().backward()
            found.append(log_probs.detach())
            first, place = first + size, place + len(ids)
    assert first == len(responses)
    return torch.cat(found), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("sizes", [(1,) * 6, (2, 4)], ids=["ones", "two and four"])
@pytest.mark.parametrize("backend", [CascadeBackend(), ReferenceBackend()], ids=lambda backend: backend.name)
@pytest.mark.parametrize("kind", MODELS)
def test_micro_batches_behind_a_cached_prompt_equal_separate_rows(kind, backend, sizes):
    model = build(kind)
    prompt, responses = group()
    wanted = separate(model, prompt, responses)
    wanted_gradients = gradients(model, wanted)
    found, ours = step(model, attach(model, backend), prompt, responses, sizes)
    assert (found - wanted).abs().max() < 1e-12
    assert relative(ours, wanted_gradients) < 1e-6


def exact_llama():
    """A llama whose norms are float64 too, so that equality is seen down to rounding."""
    model = build("llama")
    for layer in list(model.modules()):
        for name, norm in list(layer.named_children()):
            if type(norm).__name__ == "LlamaRMSNorm":
                setattr(layer, name, torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, dtype=torch.float64))
    return model


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=15)
def test_any_split_of_a_group_gives_the_whole_group_s_gradient(lengths, random):
    model = exact_llama()
    prompt, responses = group(tuple(lengths), 11, 5)
    shared = attach(model, CascadeBackend(), UNCHECKED)
    plan = SharedPromptPlan.build([(11, lengths)])
    whole, _ = shared.log_probs(torch.cat([prompt, *responses]), plan)
    wanted = gradients(model, whole) if sum(lengths) else {}
    sizes = []
    while sum(sizes) < len(lengths):
        sizes.append(random.randint(1, len(lengths) - sum(sizes)))
    found, ours = step(model, shared, prompt, responses, sizes)
    assert torch.allclose(found, whole.detach(), rtol=0, atol=1e-12)
    if sum(lengths):
        assert relative(ours, wanted) < 1e-12


def test_the_prompt_runs_forward_once_and_backward_once_whatever_the_micro_batches():
    model = build("llama")
    prompt, responses = group()
    shared = attach(model, CascadeBackend(), UNCHECKED)
    passes = {"forward": [], "backward": []}
    first = model.model.layers[0]
    first.register_forward_hook(lambda _m, inputs, _o: passes["forward"].append(inputs[0].shape[1]))
    first.register_full_backward_hook(lambda _m, _i, outputs: passes["backward"].append(outputs[0].shape[1]))
    for sizes in ((6,), (2, 1, 3), (1,) * 6):
        passes["forward"].clear()
        passes["backward"].clear()
        step(model, shared, prompt, responses, sizes)
        for seen in passes.values():
            assert seen.count(PROMPT) == 1
            assert sum(seen) == PROMPT + sum(LENGTHS)  # every response token once, no prompt token twice


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_gradient_checkpointing_recomputes_the_prompt_once_and_changes_nothing(kind, reentrant):
    model = build(kind)
    prompt, responses = group()
    wanted = gradients(model, separate(model, prompt, responses))
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    backend = Counting()
    _, ours = step(model, attach(model, backend, UNCHECKED), prompt, responses, (3, 3))
    assert relative(ours, wanted) < 1e-6
    assert backend.attended == 2 * 3 * 2  # layers, passes, forward and recomputation


@pytest.mark.parametrize("lost", ["the last hidden state", "keys and values"])
def test_without_what_the_responses_send_back_the_gradient_is_another(lost, monkeypatch):
    model = build("llama")
    prompt, responses = group()
    wanted = gradients(model, separate(model, prompt, responses))
    place = reuse._BehindLast if lost == "the last hidden state" else reuse._Behind
    usual = place.backward

    def forgetful(ctx, grad):
        grad = grad.clone()
        grad[: 1 if place is reuse._BehindLast else PROMPT] = 0
        return usual(ctx, grad)

    monkeypatch.setattr(place, "backward", staticmethod(forgetful))
    _, ours = step(model, attach(model, CascadeBackend(), UNCHECKED), prompt, responses, (3, 3))
    assert relative(ours, wanted) > 1e-2


def test_lora_adapters_train_behind_a_cached_prompt():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "lm_head"], init_lora_weights=False)
    torch.manual_seed(3)
    model = peft.get_peft_model(build("llama"), config).double()
    prompt, responses = group()
    wanted = gradients(model, separate(model, prompt, responses))
    _, ours = step(model, attach(model, SharedPromptAttention()), prompt, responses, (2, 2, 2))
    assert all("lora" in name for name in ours)
    assert relative(ours, wanted) < 1e-6


def test_half_precision_gradients_of_the_prompt_are_summed_in_float32():
    model = build("llama", torch.bfloat16)
    prompt, responses = group()
    exact = build("llama")
    exact.load_state_dict(model.state_dict())
    exact = exact.double()
    wanted = gradients(exact, separate(exact, prompt, responses))
    shared = attach(model, CascadeBackend(), UNCHECKED)
    _, ours = step(model, shared, prompt, responses, (1,) * 6)
    one = gradients(
        model, shared.log_probs(torch.cat([prompt, *responses]), SharedPromptPlan.build([(PROMPT, LENGTHS)]))[0]
    )
    assert relative(ours, wanted) < 2 * relative(one, wanted) < 0.2  # no worse than the whole group in one
    summed = reuse.Summed(torch.zeros(1, dtype=torch.bfloat16))
    for _ in range(300):
        summed.add(torch.ones(1, dtype=torch.bfloat16))
    assert summed.onto(torch.zeros(1)).item() == 300  # in bfloat16 the sum would stop at 256


def test_autocast_and_entropies_work_behind_a_cached_prompt():
    model = build("llama", torch.float32)
    prompt, responses = group()
    ids = torch.cat(responses)
    plan = SharedPromptPlan.build([(PROMPT, LENGTHS)])
    shared = attach(model, CascadeBackend())
    with torch.no_grad():
        wanted = shared.log_probs(torch.cat([prompt, ids]), plan, temperature=0.7, entropy=True)
        with shared.cached_prompt(prompt) as cached:
            found = cached.log_probs(ids, LENGTHS, temperature=0.7, entropy=True)
    assert all((one - other).abs().max() < 1e-5 for one, other in zip(found, wanted, strict=True))
    with torch.autocast("cpu", torch.bfloat16), shared.cached_prompt(prompt) as cached:
        half, _ = cached.log_probs(ids, LENGTHS, temperature=0.7)
        half.sum().backward()
    assert 1e-5 < (half - wanted[0]).abs().max() < 0.1


def test_without_gradient_nothing_is_waited_for():
    model = build("llama")
    prompt, responses = group()
    shared = attach(model, CascadeBackend(), UNCHECKED)
    with torch.no_grad(), shared.cached_prompt(prompt) as cached:
        found, _ = cached.log_probs(torch.cat(responses), LENGTHS)
    assert (found - separate(model, prompt, responses)).abs().max() < 1e-12
    with shared.cached_prompt(prompt) as cached:
        cached.log_probs(torch.empty(0, dtype=torch.int64), [0, 0])[0].sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_gradient_that_would_be_lost_stops_the_step():
    model = build("llama")
    prompt, responses = group()
    shared = attach(model, CascadeBackend(), UNCHECKED)
    late = []
    forgotten = pytest.raises(ConfigurationError, match=r"no backward pass inside its block[\s\S]*1 of 2")
    with forgotten, shared.cached_prompt(prompt) as cached:
        cached.log_probs(responses[0], [LENGTHS[0]])[0].sum().backward()
        late += cached.log_probs(responses[1], [LENGTHS[1]])[:1]
    with pytest.raises(ConfigurationError, match="came after that of its cached prompt"):
        late[0].sum().backward()
    with pytest.raises(ConfigurationError, match="outside of its block"):
        cached.log_probs(responses[0], [LENGTHS[0]])
    with pytest.raises(ZeroDivisionError), shared.cached_prompt(prompt) as cached:  # the block's own error stays
        _ = cached.log_probs(responses[0], [LENGTHS[0]])[0].sum() / (1 // 0)


@pytest.mark.parametrize("prompt_len, lengths", [(1, (3, 1)), (12, (1, 2, 1))])
def test_a_pass_over_one_token_equals_separate_rows_too(prompt_len, lengths):
    model = build("mistral")
    draw = torch.Generator().manual_seed(2)
    prompt, *responses = (torch.randint(3, 97, (n,), generator=draw) for n in (prompt_len, *lengths))
    wanted = gradients(model, separate(model, prompt, responses))
    _, ours = step(model, attach(model, CascadeBackend()), prompt, responses, (1,) * len(lengths))
    assert relative(ours, wanted) < 1e-6


def test_a_gradient_that_the_prompt_can_t_take_is_refused():
    model = build("llama")
    prompt, responses = group()
    shared = attach(model, CascadeBackend(), UNCHECKED)
    with torch.no_grad(), shared.cached_prompt(prompt) as cached, torch.enable_grad():
        with pytest.raises(ConfigurationError, match="computed without one"):
            cached.log_probs(responses[0], [LENGTHS[0]])
        with torch.no_grad():
            cached.log_probs(responses[0], [LENGTHS[0]])
    detached = pytest.raises(ConfigurationError, match="detached")
    with detached, shared.cached_prompt(prompt) as cached:
        cached.log_probs(responses[0], [LENGTHS[0]])[0].sum().backward()
        shared.detach()  # with gradient checkpointing the prompt's layers would run again without their layout


def test_token_ids_without_lengths_are_refused():
    prompt, responses = group()
    shared = attach(build("llama"), CascadeBackend(), UNCHECKED)
    with shared.cached_prompt(prompt) as cached, pytest.raises(ConfigurationError, match="0 token ids, or lengths"):
        cached.log_probs(responses[0], [0, 0])


def test_the_first_use_check_compares_gradients_in_inference_mode_too():
    model = build("mistral")
    prompt, responses = group()
    ids, plan = torch.cat([prompt, *responses]), SharedPromptPlan.build([(PROMPT, LENGTHS)])
    with torch.inference_mode():
        shared = attach(model, CascadeBackend())
        whole, _ = shared.log_probs(ids, plan)
        with shared.cached_prompt(prompt) as cached:
            found, _ = cached.log_probs(torch.cat(responses), LENGTHS)
        with pytest.raises(EqualityViolated, match="the gradient of v is missing"):
            attach(model, Faulty("loses a gradient")).log_probs(ids, plan)
    assert torch.equal(found, whole)


@pytest.mark.parametrize("fails", [True, False])
def test_a_closed_prompt_holds_no_keys_and_no_graph(fails):
    prompt, responses = group()
    shared = attach(build("llama"), CascadeBackend(), UNCHECKED)
    cached = shared.cached_prompt(prompt)
    try:
        with cached:
            noted = [weakref.ref(kept) for pair in cached._states.layers.values() for kept in pair]
            graph = weakref.ref(cached._root)
            cached.log_probs(responses[0], [LENGTHS[0]])[0].sum().backward()
            if fails:
                raise InterruptedError
    except InterruptedError:
        pass
    assert len(noted) == 4
    assert not any(one() is not None for one in [*noted, graph])


def test_what_explains_the_last_pass_is_told_of_the_cached_prompt():
    class Telling(CascadeBackend):
        def explain(self, need, plan):
            return f"cached: {need.cached_prompt}"

    prompt, responses = group()
    shared = attach(build("llama"), Telling(), UNCHECKED)
    with torch.no_grad(), shared.cached_prompt(prompt) as cached:
        assert shared.explain() == "cached: False"
        cached.log_probs(responses[0], [LENGTHS[0]])
        assert shared.explain() == "cached: True"


def test_two_open_prompts_and_whole_rows_between_them_keep_their_gradients_apart():
    model = build("llama")
    prompt, responses = group()
    other, others = group((4, 0, 7), 11, 2)

    def loss(log_probs, seed):
        return (log_probs * torch.randn(log_probs.shape, generator=torch.Generator().manual_seed(seed))).sum()

    def collected():
        found = {name: p.grad.clone() for name, p in model.named_parameters()}
        model.zero_grad()
        return found

    for first, second, seed in ((prompt, responses[:3], 1), (prompt, responses[3:], 2), (other, others, 3)):
        loss(separate(model, first, second), seed).backward()
    loss(separate(model, prompt, responses), 4).backward()
    wanted = collected()
    shared = attach(model, CascadeBackend(), UNCHECKED)
    with shared.cached_prompt(prompt) as one, shared.cached_prompt(other) as two:
        start, _ = one.log_probs(torch.cat(responses[:3]), LENGTHS[:3])
        loss(two.log_probs(torch.cat(others), (4, 0, 7))[0], 3).backward()
        whole, _ = shared.log_probs(torch.cat([prompt, *responses]), SharedPromptPlan.build([(PROMPT, LENGTHS)]))
        end, _ = one.log_probs(torch.cat(responses[3:]), LENGTHS[3:])
        (loss(whole, 4) + 0.25 * loss(end, 2)).backward(retain_graph=True)
        (0.75 * loss(end, 2) + loss(start, 1)).backward()  # a second pass through one micro-batch
    assert relative(collected(), wanted) < 1e-6


def test_one_module_that_is_several_layers_is_refused():
    model = build("llama")
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    prompt, _ = group()
    with pytest.raises(ConfigurationError, match="several layers"):
        attach(model, CascadeBackend(), UNCHECKED).cached_prompt(prompt).__enter__()


class FaultyWhenCached(Faulty):
    """A cascade whose fault shows behind a cached prompt only."""

    def attend(self, q, k, v, plan, scale, *, window=None, sinks=None):
        if not plan.first_query:
            return CascadeBackend.attend(self, q, k, v, plan, scale, window=window, sinks=sinks)
        if self.fault == "loses the prompt":
            k = torch.cat([k[: plan.first_query] * 0, k[plan.first_query :]])
            return CascadeBackend.attend(self, q, k, v, plan, scale, window=window, sinks=sinks)
        return super().attend(q, k, v, plan, scale, window=window, sinks=sinks)


@pytest.mark.parametrize("fault", ["loses the prompt", "ignores the window", "loses a gradient"])
def test_the_first_use_check_looks_at_a_cached_prompt_too(fault):
    model = build("mistral")
    prompt, responses = group()
    shared = attach(model, FaultyWhenCached(fault))
    plan = SharedPromptPlan.build([(PROMPT, LENGTHS)])
    shared.log_probs(torch.cat([prompt, *responses]), plan)  # whole groups pass
    with pytest.raises(EqualityViolated, match=fault):
        step(model, shared, prompt, responses, (3, 3))
