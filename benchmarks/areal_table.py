"""Writes the figures of areal_{periodic,update,tree}.json into docs/results/README.md, between two marks.

python benchmarks/areal_table.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bench_common import FOLDER, between, table

BEGIN, END = "<!-- areal: written by benchmarks/areal_table.py -->", "<!-- end of areal -->"


def main() -> None:
    periodic_, update_, tree_ = (
        json.loads((FOLDER / f"areal_{name}.json").read_text()) for name in ("periodic", "update", "tree")
    )
    between(BEGIN, END, "\n\n".join([periodic(periodic_), update(update_), tree(tree_)]), FOLDER)


def periodic(found: Mapping[str, Any]) -> str:
    """The runs through AReaL's loop: seconds a step, ratios, what bounds them, what the suite costs."""
    work, seconds = found["work"], found["median_seconds"]
    own, passes, same = found["overhead"], found["passes"], found["same_work"]
    parts = ("step", "waiting", "training", "own", "publication", "rest")
    names = ("step", "waiting for samples", "training", "the suite itself", "publication", "rest")
    steps = [("median seconds", *names, "periodic is")]
    for kind, name, ratio in (
        ("periodic", "ours, periodic", "-"),
        ("synchronous", "AReaL's loop, max_head_offpolicyness=0", f"**{found['faster']:.2f}x** faster"),
    ):
        steps.append((name, *(f"{seconds[kind][part]:.2f}" for part in parts), ratio))
    rows = [
        ("figure", "value"),
        ("bound (T_i + T_t) / max(T_i, T_t), T_i of the last arrival", f"{found['bound']:.2f}x"),
        ("the same with publication and rest, which nothing hides", f"{found['bound_of_the_step']:.2f}x"),
        ("closed form with the arrivals and the work of AReaL's run", f"{found['closed_form_ratio']:.2f}x"),
        (
            "periodic step against the closed form with its own passes",
            f"{100 * (found['periodic_over_closed_form'] - 1):+.1f} %",
        ),
        (
            "the suite's own time: median and largest share of a step",
            f"{100 * own['share']:.2f} %, {100 * own['share_largest']:.2f} % (goal 2 %);"
            f" {1000 * own['seconds']:.0f} ms",
        ),
        (
            f"training in {passes['parts']:.0f} parts against the whole batch",
            f"{passes['end_to_end']:.2f}x the time end to end",
        ),
        (
            f"in {passes['groups']} parts, one a group, with nothing beside it",
            f"{passes['in_one_process']:.2f}x",
        ),
        (
            "same work: largest difference of a step's mean reward; of its gradient norm, and before any update",
            f"{same['largest_reward_difference']:.0e}; {same['largest_grad_norm_difference']:.0e},"
            f" {same['first_grad_norm_difference']:.0e} (relative, float32)",
        ),
    ]
    intro = (
        f"{work['prompts']} prompts x {work['size']} responses of {work['longest'] / 16:.0f} to {work['longest']}"
        f" tokens, {work['slots']} decoded at a time with {1000 * work['delay']:.1f} ms a token (simulated), a random"
        f" Qwen2 of width {work['hidden']} with {work['layers']} layers in float32, packs of {work['pack']}"
        f" tokens, one rollout engine and one trainer rank of one thread; {work['steps']} steps each after one that"
        " isn't counted."
    )
    return f"{intro}\n\n{table(steps)}\n\n{table(rows)}"


def update(found: Mapping[str, Any]) -> str:
    """Shared prompts against AReaL's packs, and A-3PO's proximal log-probs."""
    tokens, same, a3po = found["tokens"], found["same"], found["a3po"]
    rows = [("seconds", "AReaL's packs, mended", "shared", "shared is", "theory in tokens")]
    for key, name in {"update": "update", "old_log_prob": "old log-probs"}.items():
        one = found[key]
        middle = [f"{one['seconds'][way]:.1f}" for way in ("packed", "shared")]
        rows.append((name, *middle, f"**{one['over_packed']:.2f}x** faster", f"{found['theory_tokens']:.2f}x"))
    seconds = a3po["seconds"]
    added = seconds["loss"] - seconds["loss_of_areal"]
    return (
        f"({','.join(map(str, found['shape']))}), {found['model']['shape']}'s shape with random weights in float32,"
        f" {found['model']['layers']} layers, {found['threads']} threads, sdpa on both sides; {tokens['separate']:,.0f}"
        f" tokens, fed {tokens['fed']:,.0f}. Log-probs differ by at most {same['log_probs']:.0e}, the first update's"
        f" gradient by at most {same['gradient']:.0e} of its largest element.\n\n{table(rows)}\n\n"
        f"A-3PO's proximal log-probs of its {a3po['tokens']} tokens: {1000 * seconds['interpolation']:.2f} ms, and"
        f" {1000 * added:.2f} ms for all that the loss does beyond AReaL's own (versions, weights, metrics), against"
        f" {seconds['recompute']:.1f} s of the forward of `prox_logp_method=recompute`, which is left out with it:"
        f" {a3po['recompute_over_interpolation']:,.0f}x and"
        f" {a3po['recompute_over_all_that_the_loss_adds']:,.0f}x."
    )


def tree(found: Mapping[str, Any]) -> str:
    """Shared prompts beside AReaL's tree training and its packs."""
    names = {"packed": "packs, mended", "tree": "tree training, dense mask", "shared": "shared prompts"}
    rows = [("way", "passes", "tokens", "tokens fed", "update", "log-probs", "peak MiB", "log-probs, gradient apart")]
    for way, name in names.items():
        one, apart = found["ways"][way], found["largest_differences"].get(way)
        rows.append(
            (
                name,
                str(one["micro_batches"]),
                f"{one['tokens']:,}",
                f"{one['tokens_fed']:,}",
                f"{one['seconds']['update']:.1f}",
                f"{one['seconds']['log_probs']:.1f}",
                f"{one['peak_mib_above_the_model']:,}",
                "-" if apart is None else f"{apart['log_probs']:.0e}, {apart['gradient']:.0e}",
            )
        )
    return (
        f"{found['groups']} groups of ({','.join(map(str, found['shape']))}), {found['model']['shape']} with"
        f" {found['model']['layers']} layers and {found['model']['vocabulary']:,} tokens in float32,"
        f" {found['threads']} threads; seconds of the process over its threads, each way in a process of its"
        f" own.\n\n{table(rows)}"
    )


if __name__ == "__main__":
    main()
