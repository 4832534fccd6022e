"""Shared rows against separate rows, output and gradients, in float64; the oracle builds each row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from metronome.shared_prompt.cascade import CascadeBackend
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.reference import ReferenceBackend, allowed, masked_attention

BACKENDS = [ReferenceBackend(), CascadeBackend()]
TOLERANCE = 1e-12
groups_strategy = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(0, 9), min_size=1, max_size=5)), min_size=1, max_size=3
)


def separate_rows(q, k, v, plan, scale, window=None, sinks=None):
    """Causal attention of K full rows a group; prompt outputs are taken from the first of them."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    out = []
    for group in plan.groups:
        prompt = torch.arange(group.prompt.start, group.prompt.end)
        for number, response in enumerate(group.responses):
            row = torch.cat([prompt, torch.arange(response.start, response.end)])
            place = torch.arange(len(row))
            mask = place[:, None] >= place
            if window is not None:
                mask &= place[:, None] - place < window
            scores = torch.einsum("rhd,mhd->hrm", q[row], k[row]) * scale
            scores = scores.masked_fill(~mask, -torch.inf)
            if sinks is not None:
                scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(row), 1)], dim=-1)
            weights = torch.softmax(scores, -1)[..., : len(row)]
            whole = torch.einsum("hrm,mhv->rhv", weights, v[row])
            out.append(whole if number == 0 else whole[len(prompt) :])
    return torch.cat(out)


def tensors(plan, heads=4, kv_heads=2, width=8, value_width=8, seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = [
        (plan.tokens, heads, width),
        (plan.tokens, kv_heads, width),
        (plan.tokens, kv_heads, value_width),
    ]
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in [*shapes, (heads,)]]


def outcome(attend, inputs, plan):
    """The output's real tokens and the gradients of a random linear loss on them."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = attend(*leaves)[: plan.tokens_shared]
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    gradients = torch.autograd.grad(out, leaves, weights, allow_unused=True)
    return [out.detach(), *(gradient for gradient in gradients if gradient is not None)]


def distance(one, other):
    assert len(one) == len(other)
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@given(
    groups=groups_strategy,
    padding=st.integers(0, 3),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    value_width=st.sampled_from([4, 8, 12]),
    window=st.sampled_from([None, 1, 3, 8, 40]),
    with_sinks=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_any_plan_gives_the_attention_of_separate_rows(
    backend, groups, padding, heads, value_width, window, with_sinks
):
    used = sum(prompt + sum(lengths) for prompt, lengths in groups)
    plan = SharedPromptPlan.build(groups, used + padding)
    inputs = tensors(plan, *heads, value_width=value_width)

    def ours(q, k, v, s):
        return backend.attend(q, k, v, plan, 0.4, window=window, sinks=s if with_sinks else None)

    def theirs(q, k, v, s):
        return separate_rows(q, k, v, plan, 0.4, window, s if with_sinks else None)

    assert distance(outcome(ours, inputs, plan), outcome(theirs, inputs, plan)) < TOLERANCE


@pytest.mark.parametrize("window", [None, 40, 300])
def test_the_cascade_holds_at_lengths_of_several_kernel_blocks(window):
    plan = SharedPromptPlan.build([(700, [65, 130, 65]), (30, [200, 1])], 1300)
    inputs = tensors(plan)
    ours = outcome(lambda q, k, v, s: CascadeBackend().attend(q, k, v, plan, 0.4, window=window, sinks=s), inputs, plan)
    theirs = outcome(lambda q, k, v, s: separate_rows(q, k, v, plan, 0.4, window, s), inputs, plan)
    assert distance(ours, theirs) < TOLERANCE


def test_a_causal_mask_without_the_segment_rule_is_another_attention():
    plan = SharedPromptPlan.build([(6, [4, 4])])
    inputs = tensors(plan)
    causal = torch.ones(plan.tokens, plan.tokens, dtype=torch.bool).tril()
    leaky = outcome(lambda q, k, v, s: masked_attention(q, k, v, causal, 0.4), inputs, plan)
    theirs = outcome(lambda q, k, v, s: separate_rows(q, k, v, plan, 0.4), inputs, plan)
    assert distance(leaky, theirs) > 0.1
    assert not torch.equal(causal, allowed(plan))


def test_a_window_over_packed_places_instead_of_positions_is_another_attention():
    plan = SharedPromptPlan.build([(6, [4, 4])])
    inputs = tensors(plan)
    place = torch.arange(plan.tokens)
    packed = allowed(plan) & (place[:, None] - place < 6)
    wrong = outcome(lambda q, k, v, s: masked_attention(q, k, v, packed, 0.4), inputs, plan)
    theirs = outcome(lambda q, k, v, s: separate_rows(q, k, v, plan, 0.4, 6), inputs, plan)
    assert distance(wrong, theirs) > 0.1
    right = outcome(lambda q, k, v, s: masked_attention(q, k, v, allowed(plan, 6), 0.4), inputs, plan)
    assert distance(right, theirs) < TOLERANCE


def test_padding_touches_no_real_token_and_stays_finite():
    plan = SharedPromptPlan.build([(5, [3, 2])], 14)
    q, k, v, sinks = tensors(plan)
    for backend in BACKENDS:
        before = backend.attend(q, k, v, plan, 0.4, window=3, sinks=sinks)
        other = [x.clone() for x in (q, k, v)]
        for x in other:
            x[plan.tokens_shared :] = 1e3
        after = backend.attend(*other, plan, 0.4, window=3, sinks=sinks)
        assert torch.equal(before[: plan.tokens_shared], after[: plan.tokens_shared])
        assert torch.isfinite(after).all()


def test_the_cascade_keeps_no_copy_of_keys_or_scores_for_the_backward_pass():
    plan = SharedPromptPlan.build([(64, [16] * 8)])
    leaves = [x.requires_grad_() for x in tensors(plan)[:3]]
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = CascadeBackend().attend(*leaves, plan, 0.4)
    statistics = plan.tokens * 4 * 8  # one log-sum-exp a token and head
    assert sum(kept.values()) == sum(x.nbytes for x in leaves) + out.nbytes + statistics
