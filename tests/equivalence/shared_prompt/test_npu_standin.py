"""The stand-in for Ascend's fused attention keeps the documented contract, so that tests through it mean something."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))

from npu_standin.install import installed
from npu_standin.masks import ContractError, compressed
from npu_standin.schemas import BACKWARD, FORWARD, SCHEMAS, UPDATE, before_7_2

HEADS, KV_HEADS, WIDTH, SCALE = 4, 2, 8, 0.3
QUERIES, KEYS = (2, 5, 3), (6, 5, 4)  # more keys than queries, as many
Q_ENDS, K_ENDS = (2, 7, 10), (6, 11, 15)


@pytest.fixture
def ops():
    with installed("npu_contract", strict_dtypes=False) as space:
        yield space


def tensors(dtype=torch.float64, rows=(10, 15)):
    draw = torch.Generator().manual_seed(0)
    shapes = [(rows[0], HEADS, WIDTH), (rows[1], KV_HEADS, WIDTH), (rows[1], KV_HEADS, WIDTH)]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def attend(ops, qkv, q_ends=Q_ENDS, k_ends=K_ENDS, **named):
    named = {"scale": SCALE, "actual_seq_qlen": q_ends, "actual_seq_kvlen": k_ends, **named}
    return ops.npu_fusion_attention(*qkv, qkv[0].shape[1], "TND", **named)


def gradient(ops, qkv, dy, forward, q_ends=Q_ENDS, k_ends=K_ENDS, **named):
    out, peak, total = forward[:3]
    named = {"actual_seq_qlen": q_ends, "actual_seq_kvlen": k_ends, "scale_value": SCALE, **named}
    named |= {"softmax_max": peak, "softmax_sum": total, "attention_in": out}
    return ops.npu_fusion_attention_grad(*qkv, dy, qkv[0].shape[1], "TND", **named)[:3]


def by_hand(qkv, sees):
    """Output and log-sum-exp, one row and head at a time; ``sees(i, j, n, m)`` says which keys a row sees."""
    q, k, v = qkv
    out, lse = torch.zeros_like(q), torch.zeros(q.shape[:2], dtype=q.dtype)
    q_start = k_start = 0
    for n, m in zip(QUERIES, KEYS, strict=True):
        for i in range(n):
            keys = [k_start + j for j in range(m) if sees(i, j, n, m)]
            for head in range(HEADS):
                kv = head // (HEADS // KV_HEADS)
                scores = k[keys, kv] @ q[q_start + i, head] * SCALE
                out[q_start + i, head] = torch.softmax(scores, 0) @ v[keys, kv]
                lse[q_start + i, head] = torch.logsumexp(scores, 0)
        q_start, k_start = q_start + n, k_start + m
    return out, lse


TABLE = {
    "no mask: every key": ({}, lambda i, j, n, m: True),
    "mode 2: upper left": ({"sparse_mode": 2}, lambda i, j, n, m: j <= i),
    "mode 3: lower right": ({"sparse_mode": 3}, lambda i, j, n, m: j <= i + m - n),
    "mode 4: a band at the lower right": (
        {"sparse_mode": 4, "pre_tockens": 2, "next_tockens": 0},
        lambda i, j, n, m: -2 <= j - (i + m - n) <= 0,
    ),
    "mode 4: a band that looks ahead": (
        {"sparse_mode": 4, "pre_tockens": 1, "next_tockens": 1},
        lambda i, j, n, m: -1 <= j - (i + m - n) <= 1,
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_each_mode_sees_what_the_documentation_draws(ops, case):
    named, sees = TABLE[case]
    mask = {"atten_mask": compressed()} if named else {}
    out, peak, total = attend(ops, tensors(), softmax_layout="TND", **mask, **named)[:3]
    wanted, lse = by_hand(tensors(), sees)
    assert (out - wanted).abs().max() < 1e-14
    assert (peak[..., 0] + total[..., 0].log() - lse).abs().max() < 1e-14
    others = [by_hand(tensors(), other)[0] for name, (_, other) in TABLE.items() if name != case]
    assert all((out - other).abs().max() > 1e-3 for other in others)  # the modes differ at these lengths


def test_full_masks_of_modes_0_and_1_hide_where_they_are_1(ops):
    mask = torch.zeros(5, 6, dtype=torch.uint8)
    mask[:, 1] = 1
    wanted, _ = by_hand(tensors(), lambda i, j, n, m: j != 1)
    assert (attend(ops, tensors(), atten_mask=mask, sparse_mode=1)[0] - wanted).abs().max() < 1e-14
    assert (attend(ops, tensors(), atten_mask=mask, sparse_mode=0)[0] - wanted).abs().max() < 1e-14
    band = {"pre_tockens": 9, "next_tockens": 1}
    with pytest.raises(ContractError, match="must agree"):
        attend(ops, tensors(), atten_mask=mask, sparse_mode=0, **band)
    mask |= torch.ones(5, 6, dtype=torch.uint8).triu(2)
    wanted, _ = by_hand(tensors(), lambda i, j, n, m: j != 1 and j <= i + 1)
    assert (attend(ops, tensors(), atten_mask=mask, sparse_mode=0, **band)[0] - wanted).abs().max() < 1e-14


def test_the_prefix_mode_is_causal_at_its_smallest_prefix_and_shows_the_prompt_its_future_beyond(ops):
    causal = attend(ops, tensors(), atten_mask=compressed(), sparse_mode=3)[0]
    smallest = tuple(m - n for n, m in zip(QUERIES, KEYS, strict=True))
    prefix = {"atten_mask": compressed(prefix=True), "sparse_mode": 6}
    assert torch.equal(attend(ops, tensors(), prefix=smallest, **prefix)[0], causal)
    assert (attend(ops, tensors(), prefix=(6, 3, 2), **prefix)[0] - causal).abs().max() > 1e-3
    with pytest.raises(ContractError, match=r"lies in \[4, 6\]"):
        attend(ops, tensors(), prefix=(3, 0, 1), **prefix)


def test_statistics_are_float32_eight_times_and_by_sequence_unless_asked_by_token():
    with installed("npu_statistics") as ops:
        half = tensors(torch.bfloat16)
        named = {"atten_mask": compressed(), "sparse_mode": 3}
        plain, by_token = attend(ops, half, **named), attend(ops, half, softmax_layout="TND", **named)
    for number in (1, 2):
        ordered, default = by_token[number], plain[number]
        assert ordered.dtype == default.dtype == torch.float32
        assert ordered.shape == default.shape == (10, HEADS, 8)
        assert torch.equal(ordered, ordered[..., :1].expand_as(ordered))
        start = 0
        for length in QUERIES:  # memory of a sequence: heads first
            block = default.reshape(-1, 8)[start * HEADS : (start + length) * HEADS].view(HEADS, length, 8)
            assert torch.equal(block.transpose(0, 1), ordered[start : start + length])
            start += length
    assert not torch.equal(plain[1], by_token[1])
    assert torch.equal(plain[0], by_token[0])


@pytest.mark.parametrize("layout", ["", "TND"])
@pytest.mark.parametrize("case", TABLE)
def test_the_gradient_operator_and_the_autograd_formula_are_the_softmax_s_gradient(ops, case, layout):
    named, sees = TABLE[case]
    named = {**named, **({"atten_mask": compressed()} if named else {}), "softmax_layout": layout}
    dy = torch.randn(10, HEADS, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = [x.requires_grad_() for x in tensors()]
    mask = torch.zeros(10, 15, dtype=torch.bool)
    for a, b, c, d in zip((0, *Q_ENDS), Q_ENDS, (0, *K_ENDS), K_ENDS, strict=False):
        for row in range(a, b):
            mask[row, c:d] = torch.tensor([sees(row - a, col - c, b - a, d - c) for col in range(c, d)])
    scores = torch.einsum("thd,mhd->htm", leaves[0], leaves[1].repeat_interleave(2, 1)) * SCALE
    weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), -1)
    wanted = torch.autograd.grad(torch.einsum("htm,mhd->thd", weights, leaves[2].repeat_interleave(2, 1)), leaves, dy)
    forward = attend(ops, leaves, **named)
    by_formula = torch.autograd.grad(forward[0], leaves, dy)
    assert not forward[1].requires_grad
    from_statistics = gradient(ops, [x.detach() for x in leaves], dy, [x.detach() for x in forward[:3]], **named)
    for one, two, three in zip(wanted, by_formula, from_statistics, strict=True):
        assert (one - two).abs().max() < 1e-13
        assert torch.equal(two, three)


def test_the_gradient_in_another_order_of_statistics_is_wrong(ops):
    dy = torch.ones(10, HEADS, WIDTH, dtype=torch.float64)
    forward = attend(ops, tensors(), softmax_layout="TND")
    right = gradient(ops, tensors(), dy, forward, softmax_layout="TND")
    wrong = gradient(ops, tensors(), dy, forward)
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(right, wrong, strict=True))


def test_rows_that_no_sequence_covers_are_uninitialised(ops):
    named = {"q_ends": (2, 5), "k_ends": (6, 9), "softmax_layout": "TND"}
    forward = attend(ops, tensors(), **named)
    assert all(x[:5].isfinite().all() and x[5:].isnan().all() for x in forward[:3])
    dq, dk, dv = gradient(ops, tensors(), torch.ones_like(forward[0]), forward, **named)
    assert dq[:5].isfinite().all()
    assert dq[5:].isnan().all()
    for x in (dk, dv):
        assert x[:9].isfinite().all()
        assert x[9:].isnan().all()


def test_empty_and_unused_sequences_are_taken(ops):
    whole = attend(ops, tensors())[0]
    assert torch.equal(attend(ops, tensors(), (0, 2, 2, 7, 10), (0, 6, 6, 11, 15))[0], whole)
    assert torch.equal(attend(ops, tensors(), (*Q_ENDS, 0, 0), (*K_ENDS, 0, 0))[0], whole)


REFUSED = {
    "a tensor of lengths": ({"q_ends": torch.tensor(Q_ENDS)}, "actual_seq_qlen"),
    "no lengths": ({"q_ends": None}, "needs actual_seq_qlen"),
    "lengths that aren't cumulative": ({"q_ends": (2, 5, 3)}, "cumulative"),
    "lengths beyond the rows": ({"q_ends": (2, 7, 11)}, "ends at 11 of 10"),
    "fewer sequences of keys": ({"k_ends": (6, 15)}, "as many sequences"),
    "more than 1024 sequences": ({"q_ends": (10,) * 1025, "k_ends": (15,) * 1025}, "1024 sequences"),
    "an inverted mask": ({"atten_mask": ~compressed(), "sparse_mode": 3}, "1 hides"),
    "an uncompressed mask": ({"atten_mask": compressed()[:5, :6], "sparse_mode": 3}, "compressed mask"),
    "a float mask": ({"atten_mask": compressed().double(), "sparse_mode": 3}, "bool or uint8"),
    "a mask of four dimensions": ({"atten_mask": compressed()[None, None], "sparse_mode": 3}, r"\[rows, keys\]"),
    "a mode without its mask": ({"sparse_mode": 3}, "needs its mask"),
    "mode 5": ({"sparse_mode": 5, "atten_mask": compressed()}, "5 is refused"),
    "mode 7": ({"sparse_mode": 7, "atten_mask": compressed()}, "aren't modelled"),
    "a row without keys": (
        {"q_ends": (10, 10, 10), "k_ends": (4, 4, 4), "atten_mask": compressed(), "sparse_mode": 3},
        "hides every key",
    ),
    "a band without keys": (
        {"sparse_mode": 4, "atten_mask": compressed(), "pre_tockens": 0, "next_tockens": -1},
        "hides every key",
    ),
    "dropout": ({"keep_prob": 0.9}, "keep_prob"),
    "position biases": ({"pse": torch.zeros(1)}, "pse"),
    "sinks": ({"sink": torch.zeros(HEADS)}, "sink"),
    "an unknown order": ({"softmax_layout": "NTD"}, "softmax_layout"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_documentation_forbids_or_we_do_not_model_is_refused(ops, case):
    named, message = REFUSED[case]
    with pytest.raises((ContractError, RuntimeError, TypeError), match=message):
        attend(ops, tensors(), **named)


def test_shapes_and_layouts_are_checked(ops):
    q, k, v = tensors()
    with pytest.raises(ContractError, match="layout BSND"):
        ops.npu_fusion_attention(q[None], k[None], v[None], HEADS, "BSND")
    with pytest.raises(ContractError, match="head_num"):
        ops.npu_fusion_attention(q, k, v, KV_HEADS, "TND", actual_seq_qlen=Q_ENDS, actual_seq_kvlen=K_ENDS)
    with pytest.raises(ContractError, match="one dtype"):
        attend(ops, (q, k, v.float()))
    with pytest.raises(ContractError, match="Dq = Dk >= Dv"):
        attend(ops, (q, k, torch.cat([v, v], -1)))
    with pytest.raises(ContractError, match="Dq = Dk >= Dv"):
        attend(ops, [torch.zeros(n, 1, 769) for n in (10, 15, 15)])
    assert attend(ops, (q, k, v[..., :3]))[0].shape == (10, HEADS, 3)
    forward = attend(ops, (q, k, v))
    with pytest.raises(ContractError, match="eight times"):
        gradient(ops, (q, k, v), q, [forward[0], forward[1] + torch.arange(8), forward[2]])
    with pytest.raises(ContractError, match=r"\[T, N, 8\]"):
        gradient(ops, (q, k, v), q, [forward[0], forward[1][..., :1], forward[2]])


def test_strict_dtypes_are_those_that_the_documentation_lists():
    with installed("npu_strict_dtypes") as ops:
        for dtype in (torch.bfloat16, torch.float16):
            forward = attend(ops, tensors(dtype))
            assert forward[0].dtype == dtype
            assert gradient(ops, tensors(dtype), forward[0], forward)[0].dtype == dtype
        single = attend(ops, tensors(torch.float32))
        with pytest.raises(ContractError, match="backward call isn't documented"):
            gradient(ops, tensors(torch.float32), single[0], single)
        with pytest.raises(ContractError, match="forward call isn't documented"):
            attend(ops, tensors())


def test_two_parts_of_the_keys_updated_are_the_whole(ops):
    q, k, v = tensors()
    whole = attend(ops, (q, k, v), (10,), (15,), softmax_layout="TND")
    parts = [attend(ops, (q, k[a:b], v[a:b]), (10,), (b - a,), softmax_layout="TND")[:3] for a, b in ((0, 4), (4, 15))]
    joined = ops.npu_ring_attention_update(*parts[0], *parts[1], input_layout="TND", input_softmax_layout="TND")
    assert all((one - other).abs().max() < 1e-13 for one, other in zip(joined, whole, strict=False))
    with pytest.raises(ContractError, match="by token"):
        ops.npu_ring_attention_update(*parts[0], *parts[1], input_layout="TND")


def test_the_operators_are_gone_when_the_block_ends():
    with installed("npu_gone") as space:
        assert all(hasattr(space, name) for name in (FORWARD, BACKWARD, UPDATE))
    assert not any(hasattr(torch.ops.npu_gone, name) for name in (FORWARD, BACKWARD, UPDATE))
    with installed("npu_gone", strict_dtypes=False) as space:
        assert attend(space, tensors())[0].isfinite().all()


def test_an_older_schema_lacks_what_came_later_and_still_runs():
    older = {name: before_7_2(text) for name, text in SCHEMAS.items()}
    with installed("npu_old", strict_dtypes=False, schemas=older) as space:
        names = [argument.name for argument in space.npu_fusion_attention.default._schema.arguments]
        assert names[-1] == "sync"
        assert "sink" not in str(space.npu_fusion_attention_grad.default._schema)
        assert attend(space, tensors())[0].isfinite().all()
        with pytest.raises((RuntimeError, TypeError), match="softmax_layout"):
            attend(space, tensors(), softmax_layout="TND")
