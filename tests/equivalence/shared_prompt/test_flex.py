"""FlexAttention's block mask against the reference's, pair of blocks by pair; forward in eager mode, no card here."""

import time
import tracemalloc
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import flex_attention

from metronome.contracts import AttentionNeed
from metronome.shared_prompt import flex
from metronome.shared_prompt.flex import BLOCK, FlexBackend, block_mask, blocks
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.reference import allowed, masked_attention

PLANS = {
    "one block": ([(9, [4, 4, 4])], None, False),
    "whole blocks": ([(256, [128, 128])], None, False),
    "uneven, over block edges": ([(130, [200, 1, 0, 127])], None, False),
    "many short responses": ([(300, [7] * 40)], None, False),
    "several groups and padding": ([(100, [60, 90]), (30, [200]), (1, [1, 5])], 640, False),
    "padding of several blocks": ([(20, [5])], 500, False),
    "a cached prompt": ([(200, [150, 0, 33])], None, True),
    "a cached prompt and padding": ([(256, [128, 130])], 700, True),
}
groups_strategy = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 25), min_size=1, max_size=5)), min_size=1, max_size=3
)


def built(name):
    groups, pad_to, cached = PLANS[name]
    return SharedPromptPlan.build(groups, pad_to, "cpu", cached)


def evaluated(plan, mask, block):
    """The whole mask that FlexAttention would see: full blocks, partial ones through ``mask_mod``, else nothing."""
    rows, columns = torch.arange(plan.queries)[:, None], torch.arange(plan.tokens)
    inside = mask.mask_mod(torch.tensor(0), torch.tensor(0), rows, columns)
    seen = torch.zeros(plan.queries, plan.tokens, dtype=torch.bool)
    for counts, indices, full in (
        (mask.kv_num_blocks, mask.kv_indices, False),
        (mask.full_kv_num_blocks, mask.full_kv_indices, True),
    ):
        for row, count in enumerate(counts[0, 0].tolist()):
            for column in indices[0, 0, row, :count].tolist():
                place = slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block)
                seen[place] = True if full else inside[place]
    return seen


def check(plan, window, block, listed=None):
    """Holds every pair of blocks against the reference's mask; raises AssertionError naming the pair."""
    listed = blocks(plan, window, block) if listed is None else listed
    dense = allowed(plan, window)
    marks = np.zeros(listed.partial.shape, dtype=int)
    for kind, counts, indices in ((1, listed.partial_count, listed.partial), (2, listed.full_count, listed.full)):
        for row, count in enumerate(counts):
            named = indices[row, :count]
            assert (np.diff(named) > 0).all(), f"query block {row} lists a key block twice"
            assert not marks[row, named].any(), f"query block {row} has a key block in both lists"
            marks[row, named] = kind
    assert marks.shape == (-(-plan.queries // block), -(-plan.tokens // block))
    for row, column in np.ndindex(*marks.shape):
        pair = dense[row * block : (row + 1) * block, column * block : (column + 1) * block]
        whole = pair.shape == (block, block)
        wanted = 0 if not pair.any() else 2 if whole and pair.all() else 1
        assert marks[row, column] == wanted, f"blocks {row}, {column} are marked {marks[row, column]}, not {wanted}"


@pytest.mark.parametrize("window", [None, 1, 100, 128, 1000])
@pytest.mark.parametrize("plan", PLANS)
def test_blocks_are_full_partial_or_left_out_as_the_references_mask_says(plan, window):
    plan = built(plan)
    for block in (BLOCK, 32):
        check(plan, window, block)
        assert torch.equal(evaluated(plan, block_mask(plan, window, block), block), allowed(plan, window))


@given(
    groups=groups_strategy,
    padding=st.integers(0, 20),
    window=st.sampled_from([None, 1, 2, 5, 17, 60]),
    block=st.sampled_from([1, 2, 4, 8, 16]),
)
@settings(deadline=None, max_examples=80)
def test_any_plan_has_the_references_mask_block_by_block(groups, padding, window, block):
    used = sum(prompt + sum(lengths) for prompt, lengths in groups)
    plans = [SharedPromptPlan.build(groups, used + padding)]
    if len(groups) == 1 and used + padding > groups[0][0]:
        plans.append(SharedPromptPlan.build(groups, used + padding, cached_prompt=True))
    for plan in plans:
        check(plan, window, block)
        assert torch.equal(evaluated(plan, block_mask(plan, window, block), block), allowed(plan, window))


def test_torchs_own_dense_view_and_the_transposed_lists_agree():
    plan, block = built("several groups and padding"), 32
    mask = block_mask(plan, 50, block)
    listed = blocks(plan, 50, block)
    dense = np.zeros(listed.partial.shape, dtype=int)
    for counts, indices in ((listed.partial_count, listed.partial), (listed.full_count, listed.full)):
        for row, count in enumerate(counts):
            dense[row, indices[row, :count]] = 1
    assert np.array_equal(mask.to_dense()[0, 0].numpy(), dense)
    assert np.array_equal((mask.q_num_blocks + mask.full_q_num_blocks)[0, 0].numpy(), dense.sum(0))
    assert mask.shape == (1, 1, plan.queries, plan.tokens)


def test_one_block_wrongly_marked_full_is_caught():
    plan = built("uneven, over block edges")
    listed = blocks(plan)
    row = int(np.flatnonzero(listed.partial_count)[0])
    moved = replace(listed, full=listed.full.copy(), full_count=listed.full_count.copy())
    moved.full[row, moved.full_count[row]] = listed.partial[row, 0]
    moved.full_count[row] += 1
    moved.partial_count[row] -= 1
    moved.partial[row, :-1] = listed.partial[row, 1:]
    with pytest.raises(AssertionError, match=f"blocks {row}, .* are marked 2, not 1"):
        check(plan, None, BLOCK, moved)


def test_one_block_left_out_is_caught():
    plan = built("uneven, over block edges")
    listed = blocks(plan)
    listed.partial_count[1] -= 1
    with pytest.raises(AssertionError, match="are marked 0, not 1"):
        check(plan, None, BLOCK, listed)


def test_a_window_over_packed_places_would_be_another_mask():
    plan = SharedPromptPlan.build([(20, [12, 12, 12])])
    place = torch.arange(plan.tokens)
    packed = allowed(plan) & (place[:, None] - place < 20)
    ours = evaluated(plan, block_mask(plan, 20, 8), 8)
    assert torch.equal(ours, allowed(plan, 20))
    assert not torch.equal(ours, packed)


def test_a_mask_is_made_once_for_all_layers_with_a_window():
    plan = built("whole blocks")
    assert block_mask(plan, 100) is block_mask(plan, 100)
    assert block_mask(plan, 100) is not block_mask(plan)


def test_a_row_of_32k_tokens_takes_milliseconds():
    times = []
    for _ in range(3):
        plan = SharedPromptPlan.build([(4096, [256] * 16)] * 4)
        start = time.process_time()
        block_mask(plan)
        times.append(time.process_time() - start)
    assert plan.tokens == 32768
    assert min(times) < 0.1  # 6 ms on an idle core


def test_a_row_of_a_million_tokens_takes_memory_by_its_blocks():
    plan = SharedPromptPlan.build([(15625, [2930] * 16)] * 16)
    assert 1_000_000 <= plan.tokens < 1_001_000
    pairs = (-(-plan.tokens // BLOCK)) ** 2
    tracemalloc.start()
    try:
        start = time.process_time()
        blocks(plan)
        seconds, peak = time.process_time() - start, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 * pairs + 100 * plan.tokens < plan.tokens**2 / 700
    assert seconds < 30


def tensors(plan, heads=6, kv_heads=2, width=16, value_width=16, dtype=torch.float32):
    draw = torch.Generator().manual_seed(plan.tokens)
    shapes = [
        (plan.queries, heads, width),
        (plan.tokens, kv_heads, width),
        (plan.tokens, kv_heads, value_width),
        (heads,),
    ]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.fixture
def eager():
    """FlexAttention without fused kernels: it warns about that, and specialises on every shape."""
    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=500):
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("plan", ["uneven, over block edges", "several groups and padding", "a cached prompt"])
def test_the_forward_is_the_references(plan, window, with_sinks):
    plan = built(plan)
    for heads, kv_heads, value_width in ((6, 2, 16), (4, 4, 24)):
        q, k, v, s = tensors(plan, heads, kv_heads, value_width=value_width)
        sinks = s if with_sinks else None
        with torch.no_grad():
            ours = FlexBackend("cpu").attend(q, k, v, plan, 0.4, window=window, sinks=sinks)
        exact = [x.double() for x in (q, k, v)]
        exact_sinks = s.double() if with_sinks else None
        theirs = masked_attention(*exact, allowed(plan, window), 0.4, exact_sinks)
        assert (ours - theirs).abs().max() < 2e-6
        dropped = masked_attention(
            *exact, allowed(SharedPromptPlan.build([(plan.tokens, [0])]))[plan.first_query :], 0.4
        )
        assert (ours - dropped).abs().max() > 1e-2


def test_a_row_without_queries_gives_empty_outputs_and_gradients():
    plan = SharedPromptPlan.build([(5, [0, 0])], cached_prompt=True)
    leaves = [x.requires_grad_() for x in tensors(plan, value_width=24)]
    out = FlexBackend("cpu").attend(*leaves[:3], plan, 0.4, sinks=leaves[3])
    assert out.shape == (0, 6, 24)
    assert [x.shape for x in torch.autograd.grad(out.sum(), leaves)] == [x.shape for x in leaves]


@pytest.mark.usefixtures("eager")
def test_one_compilation_serves_rows_of_all_lengths_and_windows():
    frames = torch._dynamo.testing.CompileCounterWithBackend("eager")
    compiled = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=frames)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(flex, "flex_attention", compiled)
        for count in range(2, 9):
            plan = SharedPromptPlan.build([(100 * count, [50 + count, 90])])
            q, k, v, _ = tensors(plan)
            for window in (None, 70 + count):
                found = FlexBackend("cpu").attend(q, k, v, plan, 0.4, window=window)
                assert (found - masked_attention(q, k, v, allowed(plan, window), 0.4)).abs().max() < 2e-6
    assert frames.frame_count == 1


def test_on_cuda_it_is_compiled_for_all_lengths_or_an_error(monkeypatch):
    told = {}
    monkeypatch.setattr(torch, "compile", lambda function, **options: told.update(options) or function)
    assert flex._compiled.__wrapped__() is flex_attention
    assert told["dynamic"] is told["fullgraph"] is True
    assert told["recompile_limit"] > torch._dynamo.config.recompile_limit


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize("plan", ["uneven, over block edges", "several groups and padding", "a cached prompt"])
def test_gradients_through_the_block_mask_are_the_references(plan, window, with_sinks):
    plan = built(plan)
    inputs = tensors(plan, dtype=torch.float64)[: 4 if with_sinks else 3]
    outcomes = []
    for mask in (evaluated(plan, block_mask(plan, window), BLOCK), allowed(plan, window)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = masked_attention(*leaves[:3], mask, 0.4, *leaves[3:])
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
        outcomes.append([out.detach(), *torch.autograd.grad(out, leaves, weights)])
    for one, other in zip(*outcomes, strict=True):
        assert (one - other).abs().max() < 1e-12


def test_the_log_sum_exp_carries_its_part_of_the_sinks_gradient():
    plan = built("one block")
    mask = allowed(plan)
    inputs = tensors(plan, dtype=torch.float64)

    def with_lse(q, k, v, s):  # what FlexAttention returns, and what attend() makes of it
        scores = torch.einsum("rhd,mhd->rhm", q, k.repeat_interleave(3, 1)) * 0.4
        lse = scores.masked_fill(~mask[:, None], -torch.inf).logsumexp(-1)
        return flex.add_sinks(masked_attention(q, k, v, mask, 0.4), lse, s)[0]

    outcomes = []
    for attend in (with_lse, lambda q, k, v, s: masked_attention(q, k, v, mask, 0.4, s)):
        leaves = [x.clone().requires_grad_() for x in inputs]
        outcomes.append(torch.autograd.grad(attend(*leaves).square().sum(), leaves))
    for one, other in zip(*outcomes, strict=True):
        assert (one - other).abs().max() < 1e-11


def test_there_is_no_backward_on_cpu_and_the_backend_says_so():
    plan = built("one block")
    q, k, v, _ = (x.requires_grad_() for x in tensors(plan))
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        FlexBackend("cpu").attend(q, k, v, plan, 0.4)
    reason = FlexBackend().supports(AttentionNeed("cpu", "float32", 16, 16, 6, 2))
    assert "on CPU it has no backward" in reason


def test_what_the_kernel_does_not_take_is_refused_with_a_reason():
    def reason(**changes):
        need = {"device": "cuda", "dtype": "bfloat16", "head_dim": 64, "value_dim": 64, "heads": 6, "kv_heads": 2}
        return FlexBackend().supports(AttentionNeed(**{**need, **changes}))

    assert reason(window=True, sinks=True, cached_prompt=True) is None
    assert reason(dtype="float32") is None
    assert "this is npu" in reason(device="npu")
    assert "this is float64" in reason(dtype="float64")
    assert "at least 16 wide" in reason(value_dim=8)
    assert "softcapping" in reason(softcap=True)
    assert "dropout" in reason(dropout=0.1)
    assert "don't divide" in reason(kv_heads=4)
