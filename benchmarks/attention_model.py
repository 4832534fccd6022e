"""The parts of ``attention.py`` with a whole model, and peak memory in fresh processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peer_prefix_grouper as peer
import torch
from attention_ops import Shape, interleaved
from torch import Tensor

from metronome.shared_prompt.cost import causal_pairs
from metronome.shared_prompt.huggingface import attach
from metronome.shared_prompt.logits import head_of, response_log_probs
from metronome.shared_prompt.options import SharedPromptOptions
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.select import SharedPromptAttention

MODEL_SHAPES = [(512, 4, 64), (2048, 8, 64)]
LOG_PROB_SHAPES = [(512, 8, 64), (2048, 8, 256)]
_TOKENS_AT_ONCE = 2304  # separate rows in one pass; eight rows of 2112 tokens would need some 30 GB
_WARM_UP = (64, 2, 16)


def model_section(shapes: list[Shape], repeats: int, layers: int | None) -> list[dict[str, Any]]:
    """SmolLM2-135M, one group, forward, log-probs and backward: time, differences, peak memory."""
    print(f"\nSmolLM2-135M{'' if layers is None else f' cut to {layers} layers'}, whole step, CPU seconds; peak MiB")
    print(
        f"{'Lp,K,Lr':>13} {'way':>12} {'seconds':>8} {'rows/way':>9} {'theory':>7} {'r/theory':>9} {'way/ours':>9}"
        f" {'peak':>7} {'ours/way':>9} {'log-probs':>10} {'gradient':>9}"
    )
    found = []
    for shape in shapes:
        step = Step(shape, layers)
        results = {way: (run(), step.gradient()) for way, run in step.ways().items()}
        times = interleaved(step.ways(), repeats, warm_up=False)
        peaks = {way: in_fresh_process(f"model:{way}", shape, layers) for way in times}
        theory, everywhere = step_theory(step.model.config, *shape)
        row: dict[str, Any] = {"shape": list(shape), "layers": step.model.config.num_hidden_layers}
        row |= {"theory": theory, "theory_logits_everywhere_to_ours": everywhere}
        for way, seconds in times.items():
            log_probs, gradients = (_difference(results[way][n], results["rows"][n], relative=n == 1) for n in (0, 1))
            row[way] = {
                "seconds": seconds,
                "ratio": times["rows"] / seconds,
                "to_theory": times["rows"] / seconds / theory,
                "seconds_to_ours": seconds / times["ours"],
                "peak_bytes": peaks[way],
                "largest_log_prob_difference": log_probs,
                "largest_gradient_difference": gradients,
            }
            print(
                f"{','.join(map(str, shape)):>13} {way:>12} {seconds:8.2f} {row[way]['ratio']:9.2f} {theory:7.2f}"
                f" {row[way]['to_theory']:9.2f} {row[way]['seconds_to_ours']:9.2f} {peaks[way] / 2**20:7.0f}"
                f" {peaks['ours'] / peaks[way]:9.2f} {log_probs:10.1e} {gradients:9.1e}",
                flush=True,
            )
        found.append(row)
    return found


def log_probs_section() -> list[dict[str, Any]]:
    """Peak memory of the log-probs alone, from hidden states with gradient, against the plain way."""
    found = []
    print("\nlog-probs from hidden states, forward and backward, vocabulary 49152, peak MiB above what was there")
    print(f"{'Lp,K,Lr':>13} {'plain':>7} {'ours':>7} {'ours/plain':>11} {'difference':>11}")
    for shape in LOG_PROB_SHAPES:
        peaks = {way: in_fresh_process(f"log_probs:{way}", shape, None) for way in ("plain", "ours")}
        ours, plain = (LogProbs(shape).ways()[way]() for way in ("ours", "plain"))
        row = {"shape": list(shape), "peak_bytes": peaks, "ours_to_plain": peaks["ours"] / peaks["plain"]}
        row["largest_difference"] = _difference(ours, plain, relative=False)
        found.append(row)
        print(
            f"{','.join(map(str, shape)):>13} {peaks['plain'] / 2**20:7.0f} {peaks['ours'] / 2**20:7.0f}"
            f" {row['ours_to_plain']:11.3f} {row['largest_difference']:11.1e}",
            flush=True,
        )
    return found


def step_theory(config: Any, prompt: int, count: int, length: int) -> tuple[float, float]:
    """Flops of separate rows, and of a shared row with logits everywhere, over those of the shared row.

    Forward and backward, the head on distinct label rows.

    A token costs ``3 * 2 * layers * (d H D + 2 d N D + H D d + 3 d f)``, a query-key pair ``14 layers H D`` (4
    forward, 10 backward: scores are computed again), a row of the head ``3 * 2 d V``. Separate rows need
    ``K Lr`` rows of the head, the shared row ``1 + K (Lr - 1)``: one row predicts all first tokens. With logits
    everywhere, as in prefix-grouper's README, it needs ``Lp + K Lr``.
    """
    width, heads, kv_heads, layers = (
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.num_hidden_layers,
    )
    inner = heads * config.head_dim
    weights = 2 * width * inner + 2 * width * kv_heads * config.head_dim + 3 * width * config.intermediate_size
    token, pair, head = 6 * layers * weights, 14 * layers * inner, 6 * width * config.vocab_size
    separate = count * ((prompt + length) * token + causal_pairs(prompt + length) * pair + length * head)
    shared = (prompt + count * length) * token + (1 + count * (length - 1)) * head
    shared += (causal_pairs(prompt) + count * (length * prompt + causal_pairs(length))) * pair
    everywhere = shared + (prompt - 1 + count) * head
    return separate / shared, everywhere / shared


class Step:
    """The gradient of one group's weighted log-probs, each way."""

    def __init__(self, shape: Shape, layers: int | None) -> None:
        from metronome_local.models import load_model

        self.shape = shape
        self.model: Any = load_model("smollm2").float().train()
        if layers is not None:
            self.model.model.layers = self.model.model.layers[:layers]
            self.model.config.num_hidden_layers = layers
        prompt, count, length = shape
        draw = torch.Generator().manual_seed(0)
        self.ids = torch.randint(3, self.model.config.vocab_size, (prompt + count * length,), generator=draw)
        self.weights = torch.randn(count * length, generator=draw) / (count * length)
        self.handle: Any = None

    def ways(self) -> dict[str, Callable[[], Tensor]]:
        """Name -> one step; each returns the log-probs and leaves the gradient in ``.grad``."""

        def fresh(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
            def step() -> Tensor:
                self.zero()
                return run()

            return step

        arguments = (self.model, self.ids, *self.shape, self.weights)
        return {
            "rows": fresh(self._rows),
            "ours": fresh(self._ours),
            "peer_readme": fresh(lambda: peer.step(*arguments, logits_first=True)),
            "peer_lean": fresh(lambda: peer.step(*arguments, logits_first=False)),
        }

    def zero(self) -> None:
        """Gradients of zeros: they are there before the step, as in accumulation."""
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            else:
                parameter.grad.zero_()

    def gradient(self) -> list[Tensor]:
        return [parameter.grad.clone() for parameter in self.model.parameters()]

    def _ours(self) -> Tensor:
        prompt, count, length = self.shape
        plan = SharedPromptPlan.build([(prompt, [length] * count)])
        handle = attach(self.model, SharedPromptAttention(SharedPromptOptions(self_check=False)))
        found, _ = handle.log_probs(self.ids, plan)
        (found * self.weights).sum().backward()
        handle.detach()
        return found.detach()

    def _rows(self) -> Tensor:
        """Rows without padding, as many at once as ``_TOKENS_AT_ONCE`` allows, head on response rows."""
        prompt, _, length = self.shape
        head, vocabulary = head_of(self.model, self.model.config), self.model.config.vocab_size
        at_once = max(1, _TOKENS_AT_ONCE // (prompt + length))
        found = []
        ids, weights = self.ids[prompt:].split(at_once * length), self.weights.split(at_once * length)
        for responses, weight in zip(ids, weights, strict=True):
            number = len(responses) // length
            plan = SharedPromptPlan.build([(prompt, [length])] * number)
            batch = torch.cat([self.ids[:prompt].expand(number, -1), responses.view(number, -1)], 1)
            hidden = self.model.get_decoder()(input_ids=batch, use_cache=False).last_hidden_state.flatten(0, 1)
            part, _ = response_log_probs(hidden, head, responses, plan, vocabulary)
            (part * weight).sum().backward()
            found.append(part.detach())
        return torch.cat(found)


class LogProbs:
    """Log-probs and their gradient from random hidden states of a row, SmolLM2-135M's head."""

    def __init__(self, shape: Shape) -> None:
        prompt, count, length = shape
        self.plan = SharedPromptPlan.build([(prompt, [length] * count)])
        draw = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(self.plan.tokens, 576, generator=draw).requires_grad_()
        self.weight = torch.randn(49152, 576, generator=draw).mul_(0.02).requires_grad_()
        self.tokens = torch.randint(49152, (count * length,), generator=draw)
        self.zero()

    def zero(self) -> None:
        self.hidden.grad, self.weight.grad = torch.zeros_like(self.hidden), torch.zeros_like(self.weight)

    def ways(self) -> dict[str, Callable[[], Tensor]]:
        def ours() -> Tensor:
            found, _ = response_log_probs(self.hidden, lambda x: x @ self.weight.T, self.tokens, self.plan, 49152)
            found.sum().backward()
            return found.detach()

        def plain() -> Tensor:
            logits = self.hidden[self.plan.label_rows] @ self.weight.T
            found = torch.log_softmax(logits, -1).gather(1, self.tokens[:, None])[:, 0]
            found.sum().backward()
            return found.detach()

        return {"ours": ours, "plain": plain}


def peak_of(what: str, shape: Shape, layers: int | None) -> int:
    """Bytes by which resident memory rose at most during one call: VmHWM after ``clear_refs`` less VmRSS before.

    A small call of the same kind comes first, so that lazy initialisation isn't counted; gradients are there
    before.
    """
    kind, way = what.split(":")
    if kind == "model":
        step = Step(shape, layers)
        step.shape, whole = _WARM_UP, step.shape
        ids, weights = step.ids, step.weights
        step.ids, step.weights = ids[: 64 + 2 * 16], weights[: 2 * 16]
        step.ways()[way]()
        step.shape, step.ids, step.weights = whole, ids, weights
        run = step.ways()[way]
    else:
        LogProbs(_WARM_UP).ways()[way]()
        run = LogProbs(shape).ways()[way]
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    run()
    return _memory("VmHWM") - before


def in_fresh_process(what: str, shape: Shape, layers: int | None) -> int:
    """``peak_of`` in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("attention.py")), "--peak-of", what]
    command += ["--shapes", ",".join(map(str, shape)), *(() if layers is None else ("--layers", str(layers)))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return int(done.stdout.split()[-1])


def _memory(field: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{field}:")[1].split()[0]) * 1024


def _difference(found: Any, wanted: Any, relative: bool) -> float:
    """Largest difference; of gradients, relative to each parameter's largest value."""
    if isinstance(found, Tensor):
        found, wanted = [found], [wanted]
    return max(
        ((a - b).abs().max() / (b.abs().max() if relative else 1)).item() for a, b in zip(found, wanted, strict=True)
    )
