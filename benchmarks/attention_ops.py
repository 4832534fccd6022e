"""The parts of ``attention.py`` without a model: time, exactness, bytes saved for backward, building plans."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import peer_prefix_grouper as peer
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from metronome.shared_prompt.cost import attention_ratio
from metronome.shared_prompt.options import SharedPromptOptions
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.select import SharedPromptAttention, backend_named

HEADS, KV_HEADS, WIDTH = 9, 3, 64
SHAPES = [
    *((128, 4, 64), (128, 8, 64), (128, 16, 64), (128, 8, 256)),
    *((512, 4, 64), (512, 8, 64), (512, 16, 64), (512, 8, 256)),
    *((2048, 4, 64), (2048, 8, 64), (2048, 4, 256), (2048, 8, 256)),
]
HALF_SHAPES = [(128, 8, 64), (512, 8, 64), (512, 8, 256), (2048, 8, 64)]
THEORY_SHAPES = ((512, 8, 64), (2048, 8, 64), (2048, 8, 256))
SAVED_SHAPES = [(128, 8, 64), (512, 8, 64), (2048, 8, 64), (2048, 8, 256)]
_DENSE_TOKENS = 1600  # longest row whose [T,T] scores are run

Shape = tuple[int, int, int]


class Case:
    """One shape: random inputs, and every way to compute attention over them."""

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.prompt, self.count, self.length = shape
        self.plan = SharedPromptPlan.build([(self.prompt, [self.length] * self.count)])
        draw = torch.Generator().manual_seed(0)
        heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)  # q, k, v, the output's gradient
        self.packed = [torch.randn(self.plan.tokens, n, WIDTH, generator=draw).to(dtype) for n in heads]
        self.group = peer.grouper(*shape)
        self.shared = SharedPromptAttention(SharedPromptOptions(self_check=False))

    def ways(self) -> dict[str, Callable[[], list[Tensor]]]:
        """Name -> forward and backward; each returns the output and the gradients of q, k and v.

        Inputs lie contiguously in the layout that each interface takes, made before the clock starts: rows
        ``[K,H,Lp+Lr,D]``, ours ``[T,H,D]``, the peer's ``[1,H,T,D]``.
        """
        heads_first = [x.transpose(0, 1)[None].contiguous() for x in self.packed[:3]]
        weights = self.packed[3][None]
        found = {
            "rows": _timed(causal_rows, [self.rows(x) for x in self.packed[:3]], self.rows(self.packed[3])),
            "ours": _timed(self.attend, self.packed[:3], self.packed[3]),
            "peer_lean": _timed(lambda *qkv: self.group.forward(peer.lean, *qkv), heads_first, weights),
            "peer_plain": _timed(lambda *qkv: self.group.forward(peer.plain, *qkv), heads_first, weights),
        }
        if self.plan.tokens <= _DENSE_TOKENS:
            dense = backend_named("reference")
            found["dense"] = _timed(
                lambda *qkv: dense.attend(*qkv, self.plan, WIDTH**-0.5), self.packed[:3], self.packed[3]
            )
        return found

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.shared.attend(q, k, v, self.plan, WIDTH**-0.5)

    def rows(self, x: Tensor) -> Tensor:
        """``[T,H,D] -> [K,H,Lp+Lr,D]``."""
        own = x[self.prompt :].unflatten(0, (self.count, self.length))
        return torch.cat([x[: self.prompt].expand(self.count, -1, -1, -1), own], 1).transpose(1, 2).contiguous()

    def exact(self) -> list[Tensor]:
        """The output, dq, dk, dv in float64, from K separate rows that autograd takes back to the packed tokens."""
        leaves = [x.double().requires_grad_() for x in self.packed[:3]]
        out = self.packed_from(causal_rows(*(self.rows(x) for x in leaves)), add=False)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.packed[3].double())]

    def packed_from(self, x: Tensor, add: bool) -> Tensor:
        """``[K,H,Lp+Lr,D] -> [T,H,D]``; the prompt's copies are added (gradients) or the first is taken."""
        x = x.transpose(1, 2)
        first = x[:, : self.prompt].sum(0) if add else x[0, : self.prompt]
        return torch.cat([first, x[:, self.prompt :].flatten(0, 1)])

    def error(self, way: str, found: list[Tensor], exact: list[Tensor]) -> float:
        """Largest difference of output and gradients, each relative to its largest value.

        Separate rows got the output's gradient K times at prompt tokens, so there only the output is compared.
        """
        if way == "rows":
            found = [self.packed_from(found[0].double(), add=False)]
        elif way.startswith("peer"):
            found = [found[0][0], *(x[0].transpose(0, 1) for x in found[1:])]
        pairs = zip(found, exact, strict=False)
        return max(((one.double() - other).abs().max() / other.abs().max()).item() for one, other in pairs)


def causal_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The other side: K rows of equal length without padding, the kernel's native grouped heads."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def repeated_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``causal_rows`` with keys and values repeated for every query head, as hosts do without native support."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def attention_section(repeats: int) -> list[dict[str, Any]]:
    """Times and errors at every shape."""
    found = []
    print("\nattention, forward and backward, 9/3 heads x 64, ms of CPU; errors against float64 (output, dq, dk, dv)")
    print(
        f"{'dtype':>9} {'Lp,K,Lr':>13} {'rows':>7} {'ours':>7} {'ratio':>6} {'theory':>7} {'r/theory':>9}"
        f" {'peer lean':>10} {'plain':>7} {'peer/ours':>10} {'dense':>7}  {'errors: ours, peer, rows'}"
    )
    for dtype, shapes in ((torch.float32, SHAPES), (torch.bfloat16, HALF_SHAPES)):
        for shape in shapes:
            case = Case(shape, dtype)
            ways = case.ways()
            exact = case.exact()
            errors = {way: case.error(way, run(), exact) for way, run in ways.items()}
            del exact
            dense = {way: ways.pop(way) for way in ("dense",) if way in ways}
            times = interleaved(ways, repeats * max(1, 1024 // case.prompt))  # short ones oftener, against noise
            times |= interleaved(dense, repeats)  # apart: the memory that it frees goes back, others would fault it in
            row = {
                "dtype": str(dtype).removeprefix("torch."),
                "shape": list(shape),
                "milliseconds": {way: 1e3 * seconds for way, seconds in times.items()},
                "errors": errors,
                "ratio": times["rows"] / times["ours"],
                "theory": attention_ratio(case.prompt, [case.length] * case.count),
                "peer_to_ours": min(times["peer_lean"], times["peer_plain"]) / times["ours"],
            }
            row["to_theory"] = row["ratio"] / row["theory"]
            found.append(row)
            ms = row["milliseconds"]
            slowest = f"{ms['dense']:7.1f}" if "dense" in ms else f"{'-':>7}"
            print(
                f"{row['dtype']:>9} {','.join(map(str, shape)):>13} {ms['rows']:7.1f} {ms['ours']:7.1f}"
                f" {row['ratio']:6.2f} {row['theory']:7.2f} {row['to_theory']:9.2f} {ms['peer_lean']:10.1f}"
                f" {ms['peer_plain']:7.1f} {row['peer_to_ours']:10.2f} {slowest}"
                f"  {errors['ours']:.0e}, {errors['peer_lean']:.0e}, {errors['rows']:.0e}",
                flush=True,
            )
    return found


def saved_section() -> list[dict[str, Any]]:
    """Bytes that autograd keeps from forward to backward, in unique storages; q, k and v count on every side.

    Rows with native grouped heads keep q, k, v, the output and its log-sum-exp, and so do we: what is left is
    the ratio of tokens. Rows whose keys and values are repeated for every query head keep the repeats too.
    """
    found = []
    print("\nbytes saved for backward by the attention operation, MiB (unique storages, inputs q, k, v included)")
    print(
        f"{'Lp,K,Lr':>13} {'rows':>7} {'repeated':>9} {'ours':>7} {'peer':>7} {'ours/rows':>10}"
        f" {'ours/repeated':>14} {'peer/rows':>10} {'tokens':>7}"
    )
    for shape in SAVED_SHAPES:
        case = Case(shape, torch.float32)
        heads_first = [x.transpose(0, 1)[None].contiguous() for x in case.packed[:3]]
        sizes = {
            "rows": saved_bytes(causal_rows, [case.rows(x) for x in case.packed[:3]]),
            "rows_repeated": saved_bytes(repeated_rows, [case.rows(x) for x in case.packed[:3]]),
            "ours": saved_bytes(case.attend, case.packed[:3]),
            "peer": saved_bytes(lambda *qkv, case=case: case.group.forward(peer.lean, *qkv), heads_first),
        }
        row = {
            "shape": list(shape),
            "bytes": sizes,
            "ours_to_rows": sizes["ours"] / sizes["rows"],
            "ours_to_rows_repeated": sizes["ours"] / sizes["rows_repeated"],
            "peer_to_rows": sizes["peer"] / sizes["rows"],
            "token_ratio": case.plan.tokens_shared / case.plan.tokens_separate,
        }
        found.append(row)
        mib = {way: size / 2**20 for way, size in sizes.items()}
        print(
            f"{','.join(map(str, shape)):>13} {mib['rows']:7.1f} {mib['rows_repeated']:9.1f} {mib['ours']:7.1f}"
            f" {mib['peer']:7.1f} {row['ours_to_rows']:10.4f} {row['ours_to_rows_repeated']:14.4f}"
            f" {row['peer_to_rows']:10.4f} {row['token_ratio']:7.4f}",
            flush=True,
        )
    return found


def saved_bytes(attend: Callable[..., Tensor], inputs: list[Tensor]) -> int:
    """Sum over unique storages that ``saved_tensors_hooks`` shows; masks that are kept between calls count too."""
    sizes: dict[int, int] = {}
    held: list[Tensor] = []  # so that no storage is freed and its address used again

    def pack(x: Tensor) -> Tensor:
        sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        held.append(x)
        return x

    leaves = [x.clone().requires_grad_() for x in inputs]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        attend(*leaves)
    return sum(sizes.values())


def plan_section(repeats: int) -> dict[str, Any]:
    """Building the plan of 64 groups of 16 responses, lengths 1 to 256."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 257, (64, 17), generator=draw).tolist()
    groups = [(prompt, responses) for prompt, *responses in lengths]
    times = interleaved({"plan": lambda: SharedPromptPlan.build(groups)}, max(repeats, 25))
    print(f"\na plan of 64 groups x 16 responses, lengths up to 256: {1e3 * times['plan']:.2f} ms")
    return {"groups": 64, "responses": 16, "longest": 256, "milliseconds": 1e3 * times["plan"]}


def interleaved(ways: dict[str, Callable[[], Any]], repeats: int, warm_up: bool = True) -> dict[str, float]:
    """Median CPU seconds of this process for each way, run in turns after one warm-up each unless they are warm."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for repeat in range(0 if warm_up else 1, repeats + 1):
        for way, run in ways.items():
            start = time.process_time()
            run()
            if repeat:
                times[way].append(time.process_time() - start)
    return {way: statistics.median(found) for way, found in times.items()}


def _timed(attend: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor) -> Callable[[], list[Tensor]]:
    leaves = [x.clone().requires_grad_() for x in inputs]

    def run() -> list[Tensor]:
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    return run
