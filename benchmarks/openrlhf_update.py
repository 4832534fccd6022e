"""OpenRLHF's real actor worker in one process: shared prompts and A-3PO against what it does without them.

    python benchmarks/openrlhf_update.py --out docs/results/openrlhf_update.json

A random model of SmolLM2-135M's shape in float32, sdpa on both sides, DeepSpeed ZeRO-2 on gloo. The update is
OpenRLHF's ``fit`` of one group with one optimiser step, old and reference log-probs are its workers' ``forward``. A
pass of OpenRLHF's takes half of the rows (memory), which is more than the whole shared group; the rows are equally
long and have no padding (packing them needs flash-attn). A first round isn't counted: from the same weights on both
sides it gives log-probs and, with one update, gradients to compare, and makes the first-use check. Then ways take
turns. The proximal log-probs are timed on as many tokens against the actor's forward for old log-probs, which they
make needless.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("TQDM_DISABLE", "1")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "openrlhf_host"))

import torch
import workers  # of tests/openrlhf_host; attaches the CPU room
from bench_common import in_turns, save_smollm2

from metronome.shared_prompt.cost import token_ratio

SHARED = {"attention": "shared_prompt"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="512,8,64", help="prompt,responses,response length")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = {
        "command": "python benchmarks/openrlhf_update.py " + " ".join(sys.argv[1:]),
        **measure(tuple(map(int, arguments.shape.split(","))), arguments.layers, arguments.repeats, arguments.threads),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n")
    return 0


def measure(shape: Sequence[int], layers: int, repeats: int, threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    prompt, count, length = shape
    if count % 2:
        raise SystemExit(
            f"--shape: {count} responses; OpenRLHF's side takes half of them a pass, so give an even number"
        )
    half = count // 2
    with tempfile.TemporaryDirectory() as folder:
        model = save_smollm2(workers.model(Path(folder)).model, layers)  # with the tiny model's tokenizer
        separate = Side(model, None, half, shape)
        shared = Side(model, SHARED, count, shape)
    rows = group(shape, 49152)
    first, second = separate.log_probs(rows), shared.log_probs(rows)
    for row, old in zip(rows, first, strict=True):
        row.action_log_probs = old[None]
    references = separate.references(rows), shared.references(rows)
    same = {
        "log_probs": float((first - second).abs().max()),
        "reference_log_probs": float((references[0] - references[1]).abs().max()),
        **same_gradients(separate, shared, rows),
    }
    updates = in_turns(
        {"rows": lambda: separate.update(rows), "shared": lambda: shared.update(rows)}, repeats, warm=True
    )
    passes = in_turns(
        {"rows": lambda: separate.log_probs(rows), "shared": lambda: shared.log_probs(rows)}, repeats, warm=True
    )
    others = in_turns(
        {"rows": lambda: separate.references(rows), "shared": lambda: shared.references(rows)}, repeats, warm=True
    )
    fed, whole = (shared.status[f"metronome/attention/{key}"] for key in ("tokens_fed", "tokens_separate"))
    return {
        "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "model": {"shape": "SmolLM2-135M", "layers": layers, "weights": "random", "dtype": "float32"},
        "shape": list(shape),
        "rows_a_pass": {"rows": half, "shared": count},
        "threads": threads,
        "repeats": repeats,
        "torch": torch.__version__,
        "clock": "wall seconds, medians of ways in turns",
        "load_average": os.getloadavg()[0],
        "tokens": {"separate": whole, "fed": fed, "ratio": whole / fed},
        "theory_tokens": token_ratio(prompt, [length] * count),
        "same": same,
        "update": compared(updates),
        "old_log_prob": compared(passes),
        "reference_log_prob": compared(others),
        "a3po": proximal(rows, statistics.median(passes["rows"])),
    }


class Side:
    """OpenRLHF's actor worker, or ours with ``block``, whose passes take ``micro`` rows; and its reference worker."""

    def __init__(self, model: Path, block: dict[str, Any] | None, micro: int, shape: Sequence[int]) -> None:
        prompt, count, length = shape
        args = workers.arguments(
            block,
            ds__attn_implementation="sdpa",
            train__batch_size=count,
            train__micro_batch_size=micro,
            rollout__batch_size=1,
            rollout__n_samples_per_prompt=count,
            rollout__micro_batch_size=micro,
            rollout__max_new_tokens=length,
            data__max_len=prompt + length,
            actor__adam__lr=1e-6,
        )
        self.micro = micro
        self.worker = workers.stock(args, model) if block is None else workers.policy(args, model)
        self.reference = _reference(args, model, block)
        self.status: dict[str, Any] = {}

    def update(self, rows: list[Any]) -> None:
        self.status = workers.whole_step(self.worker, [rows])

    def log_probs(self, rows: list[Any]) -> torch.Tensor:
        return self._forward(self.worker, rows)

    def references(self, rows: list[Any]) -> torch.Tensor:
        return self._forward(self.reference, rows)

    def _forward(self, worker: Any, rows: list[Any]) -> torch.Tensor:
        found = []
        for at in range(0, len(rows), self.micro):
            batch = workers.together(rows[at : at + self.micro])
            found.append(worker.forward(batch.sequences, batch.action_mask, attention_mask=batch.attention_mask))
        return torch.cat(found)


def _reference(args: Any, model: Path, block: dict[str, Any] | None) -> Any:
    from openrlhf.trainer.ray import launcher
    from openrlhf.utils import get_strategy

    from metronome_openrlhf.reference import MetronomeReference

    kind = launcher.ReferenceModelActor.__ray_metadata__.modified_class if block is None else MetronomeReference
    made = object.__new__(kind)
    made.init_model_from_pretrained(get_strategy(args), str(model))
    return made


def group(shape: Sequence[int], vocabulary: int) -> list[Any]:
    """Rows of one group: a prompt, and responses drawn at random with alternating advantages."""
    prompt, count, length = shape
    workers.install()
    generator = torch.Generator().manual_seed(1)
    asked = torch.randint(3, vocabulary, (prompt,), generator=generator)
    rows = [
        workers.row(asked, torch.randint(3, vocabulary, (length,), generator=generator), generator)
        for _ in range(count)
    ]
    for place, row in enumerate(rows):
        row.advantages = row.returns = (-1.0) ** place * row.action_mask.float()
    return rows


def same_gradients(separate: Side, shared: Side, rows: list[Any]) -> dict[str, float]:
    """The first update of both: norms, and the largest difference of an element by the largest element."""
    for side in (separate, shared):
        side.update(rows)
    one, other = workers.moments(separate.worker), workers.moments(shared.worker)  # 0.1 times the gradient
    return {
        "gradient": float((one - other).abs().max() / one.abs().max()),
        "grad_norm": separate.status["actor_grad_norm"],
        "grad_norm_shared": shared.status["actor_grad_norm"],
    }


def compared(times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    middle = {way: statistics.median(seconds) for way, seconds in times.items()}
    return {
        "seconds": middle,
        "all_seconds": {way: list(seconds) for way, seconds in times.items()},
        "over_rows": middle["rows"] / middle["shared"],
    }


def proximal(rows: list[Any], forward: float, repeats: int = 31) -> dict[str, Any]:
    """What A-3PO computes instead of ``forward`` seconds: the interpolation; and its whole loss beside OpenRLHF's."""
    from openrlhf.models import PolicyLoss

    from metronome.a3po.proximal import alpha, loglinear
    from metronome_openrlhf.config import part_of
    from metronome_openrlhf.loss import HostLoss

    batch = workers.together(rows)
    mask = batch.action_mask
    theta = (batch.rollout_log_probs + 0.05 * torch.sin(torch.arange(mask.numel()).view_as(mask))).requires_grad_()
    ours = HostLoss(part_of(workers.arguments({"loss": "a3po"})), True, True)
    ours.version, ours.experience = 2, SimpleNamespace(versions=batch.versions)  # sampled by version 0
    stock = PolicyLoss()
    trained = mask.bool()
    behavior, target = batch.rollout_log_probs[trained], theta.detach()[trained]
    staleness = torch.full(behavior.shape, 2)

    def whole(loss: Callable[..., Any]) -> Callable[[], object]:
        given = {"action_mask": mask, "rollout_log_probs": batch.rollout_log_probs, "batch_num_tokens": mask.sum()}
        return lambda: torch.autograd.grad(loss(theta, batch.rollout_log_probs, batch.advantages, **given)[0], theta)

    times = in_turns(
        {
            "interpolation": lambda: loglinear(behavior, target, alpha(staleness, strict=False)),
            "loss": whole(ours),
            "loss_of_openrlhf": whole(stock),
        },
        repeats,
    )
    middle = {way: statistics.median(seconds) for way, seconds in times.items()}
    return {
        "tokens": behavior.numel(),
        "seconds": {"old_log_prob": forward, **middle},
        "old_log_prob_over_interpolation": forward / middle["interpolation"],
        # versions, metrics and checks included
        "old_log_prob_over_all_that_the_loss_adds": forward / max(middle["loss"] - middle["loss_of_openrlhf"], 1e-6),
    }


if __name__ == "__main__":
    sys.exit(main())
