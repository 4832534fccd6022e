"""Writes the figures of verl_periodic.json and verl_update.json into docs/results/README.md, between two marks.

python benchmarks/verl_table.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bench_common import FOLDER, between, table

BEGIN, END = "<!-- verl: written by benchmarks/verl_table.py -->", "<!-- end of verl -->"


def main() -> None:
    measured = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in ("verl_periodic", "verl_update")}
    text = periodic(measured["verl_periodic"]) + "\n\n" + update(measured["verl_update"])
    between(BEGIN, END, text, FOLDER)


def periodic(found: Mapping[str, Any]) -> str:
    """The end-to-end runs: seconds a step, ratios, what bounds them, what the suite costs."""
    work, seconds, faster = found["work"], found["median_seconds"], found["faster_than"]
    own, passes, same = found["overhead"], found["passes"], found["same_work"]
    names = {
        "periodic": "ours, periodic",
        "separate": "verl's separate trainer, synchronous, as it is",
        "separate_short_poll": "the same, looking for groups every 20 ms instead of 2 s",
        "colocated": "verl's colocated trainer (one device instead of two), as it is",
        "colocated_short_poll": "the same, looking every 20 ms",
    }
    parts = ("step", "generation", "training", "publish", "rest")
    steps = [("median seconds", "step", "waiting for samples", "training", "publication", "rest", "periodic is")]
    for kind, name in names.items():
        ratio = f"**{faster[kind]:.2f}x**" if kind in faster else "-"
        steps.append((name, *(f"{seconds[kind][part]:.2f}" for part in parts), ratio))
    figures = [
        ("figure", "value"),
        ("bound (T_i + T_t) / max(T_i, T_t), T_i of the last arrival", f"{found['bound']:.2f}x"),
        ("the same with publication and rest, which nothing hides", f"{found['bound_of_the_step']:.2f}x"),
        ("closed form with the arrivals and the work of the synchronous run", f"{found['closed_form_ratio']:.2f}x"),
        (
            "periodic step against the closed form with its own (slower) passes",
            f"{100 * (found['periodic_over_closed_form'] - 1):+.1f} %",
        ),
        (
            "the suite's own time: share of a step, late discovery at its most",
            f"{100 * own['share']:.2f} % (goal 2 %), of which late {1000 * own['late_seconds']:.0f} ms"
            f" and in the worker {1000 * own['worker_seconds']:.0f} ms",
        ),
        (
            f"training in {passes['parts']:.0f} parts against the whole batch",
            f"{passes['end_to_end']:.2f}x the time end to end, {passes['in_one_process']:.2f}x in one process",
        ),
        (
            "same work: largest difference of a step's mean score and gradient norm",
            f"{same['largest_score_difference']:.0e}, {same['largest_grad_norm_difference']:.0e} (relative)",
        ),
    ]
    intro = (
        f"{work['prompts']} prompts x {work['size']} responses of {work['length']} tokens, {work['slots']} decoded at a"
        f" time with at least {1000 * work['delay']:.1f} ms a token (simulated), a random Qwen2 of width"
        f" {work['hidden']} with {work['layers']} layers in float32, one rollout replica and one trainer rank, one"
        f" thread a process; {work['steps']} steps each after one that isn't counted."
    )
    return f"{intro}\n\n{table(steps)}\n\n{table(figures)}"


def update(found: Mapping[str, Any]) -> str:
    """The update over shared prompts, and A-3PO's proximal log-probs."""
    shape, tokens, a3po = found["shape"], found["tokens"], found["a3po"]
    rows = [("seconds", "separate rows, packed", "separate rows", "shared", "shared is", "theory in tokens")]
    for key, name in (("update", "update"), ("old_log_prob", "old log-probs")):
        one = found[key]
        middle = [f"{one['seconds'][way]:.1f}" for way in ("packed", "rows", "shared")]
        rows.append((name, *middle, f"**{one['over_the_faster']:.2f}x** faster", f"{found['theory_tokens']:.2f}x"))
    seconds = a3po["seconds"]
    added = seconds["loss"] - seconds["loss_of_verl"]
    return (
        f"({','.join(map(str, shape))}), {found['model']['shape']}'s shape with random weights in float32,"
        f" {found['threads']} threads, sdpa on both sides; {tokens['separate']:,.0f} tokens, fed {tokens['fed']:,.0f}."
        f" Ratios are against the faster of verl's two ways.\n\n{table(rows)}\n\n"
        f"A-3PO's proximal log-probs of its {a3po['tokens']} tokens: {1000 * seconds['interpolation']:.2f} ms, and"
        f" {1000 * added:.2f} ms for all that the loss does beyond verl's own (versions, weights, metrics), against"
        f" {seconds['old_log_prob']:.1f} s of verl's pass for old log-probs, which bypass mode leaves out:"
        f" {a3po['old_log_prob_over_interpolation']:,.0f}x and"
        f" {a3po['old_log_prob_over_all_that_the_loss_adds']:,.0f}x."
    )


if __name__ == "__main__":
    main()
