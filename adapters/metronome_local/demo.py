"""``make demo``: all four hooks train a real model for a few minutes, and a table says what each of them did."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from metronome.contracts import RolloutSource
from metronome.errors import MetronomeError
from metronome.periodic.closed_form import speed_bound
from metronome.periodic.sources import Bounded, Periodic, Synchronous
from metronome.recipes import load_recipe
from metronome_local.build import build
from metronome_local.host import default_folder
from metronome_local.paired import Pair, paired_period
from metronome_local.progress import memory_line
from metronome_local.trainer import Trainer
from metronome_local.validation import validate

_PAIRS = 3  # periods measured under both schedules,
_PROMPTS, _SIZE = 8, 8  # of this many groups and rollouts in each
_STALE = 5  # periods of the bounded run


def main(arguments: list[str]) -> int:
    """Runs the recipe in three acts: the two schedules on the same work, a short bounded run, learning."""
    recipe = arguments[0] if arguments else "recipes/local/demo.yaml"
    console = Console()
    started = time.monotonic()
    try:
        parsed, settings, selection, device = validate(load_recipe(recipe, arguments[1:]), recipe)
        folder = default_folder("demo")
        trainer = build(parsed, settings, selection, device, folder, console, base=Path(recipe).parent, alias=False)
    except MetronomeError as error:
        print(f"metronome: error: {error}", file=sys.stderr)
        return error.exit_code
    try:
        return _acts(trainer, console, started)
    except MetronomeError as error:
        print(f"metronome: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:  # the first two acts have no checkpoint to leave
        print("metronome: error: interrupted", file=sys.stderr)
        return 130
    finally:
        trainer.close()
        trainer.parts.progress.close()


def _acts(trainer: Trainer, console: Console, started: float) -> int:
    console.rule("1. The same work under both schedules: same weights, prompts and seeds")
    trainer.start()
    pairs = []
    for number in range(_PAIRS):
        sources: list[RolloutSource] = [Synchronous(), Periodic()] if number % 2 else [Periodic(), Synchronous()]
        pair = paired_period(trainer, sources, _PROMPTS, _SIZE, 1_000_000 + number * _PROMPTS)
        pairs.append(pair)
        console.print(
            f"   synchronous {pair.seconds('synchronous'):.1f} s, periodic {pair.seconds('periodic'):.1f} s; "
            f"{pair.sampled_alike} of {_PROMPTS} groups sampled alike, "
            f"relative difference of the gradients {pair.difference:.1e}",
            highlight=False,
            soft_wrap=True,
        )

    console.rule("2. A short bounded run: groups up to two versions old, where A-3PO acts")
    trainer.use(Bounded(2))
    while trainer.period < _STALE:
        trainer.run_period()
    stale = list(trainer.history)

    console.rule("3. On policy again, all four hooks: periodic, a3po, shared_prompt, sagc")
    trainer.use(trainer.parts.selection.rollout_source)
    trainer.run()
    if trainer.interrupted:
        return 130
    trainer.parts.pool.close()
    console.print(_table(trainer, pairs, stale))
    console.print(
        f"{time.monotonic() - started:.0f} s in all; {memory_line(trainer.parts.pool.peak_memory(), trainer.source)}",
        highlight=False,
        soft_wrap=True,
    )
    folder = trainer.parts.progress.folder
    console.print(f"run folder: {folder} (metrics.jsonl, groups.jsonl, tensorboard, checkpoints)", soft_wrap=True)
    return 0


def _table(trainer: Trainer, pairs: list[Pair], stale: list[dict[str, Any]]) -> Table:
    table = Table(title="What the hooks did", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("hook", no_wrap=True)
    table.add_column("figure")
    table.add_column("value", overflow="fold")
    for row in [
        *_schedule_rows(pairs),
        *_sharing_rows(trainer.history),
        *_loss_rows(stale),
        *_group_rows(trainer.history),
    ]:
        table.add_row(*row)
    first = statistics.fmean(record["reward"] for record in trainer.history[:2])
    last = statistics.fmean(record["reward"] for record in trainer.history[-2:])
    table.add_row("run", "reward, first two and last two periods", f"{first:.2f} -> {last:.2f}")
    accuracies = " -> ".join(f"{value:.2f}" for _, value in trainer.accuracies)
    table.add_row("run", "held-out exact accuracy", accuracies)
    return table


def _schedule_rows(pairs: list[Pair]) -> list[tuple[str, str, str]]:
    def middle(value: Callable[[Pair], float]) -> float:
        return statistics.median(value(pair) for pair in pairs)

    slow, fast = middle(lambda pair: pair.seconds("synchronous")), middle(lambda pair: pair.seconds("periodic"))
    ratio = middle(lambda pair: pair.seconds("synchronous") / pair.seconds("periodic"))
    form = middle(lambda p: p.measured["periodic"].seconds / p.measured["periodic"].closed_form("periodic"))
    bound = middle(lambda p: speed_bound(max(p.measured["synchronous"].arrivals), sum(p.measured["synchronous"].work)))
    return [
        ("rollout_source", "period, synchronous against periodic", f"{slow:.1f} s against {fast:.1f} s: {ratio:.2f}x"),
        ("rollout_source", "bound (T_i + T_t) / max(T_i, T_t)", f"{bound:.2f}x; 2x where both take equally long"),
        ("rollout_source", "period against its closed form", f"{form:.3f}"),
        ("rollout_source", "largest difference of the gradients", f"{max(p.difference for p in pairs):.1e} (float32)"),
    ]


def _sharing_rows(records: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    separate = sum(record["tokens_separate"] for record in records)
    computed = sum(record["tokens_computed"] for record in records)
    return [("attention", "tokens trained, of them computed", f"{separate} / {computed} = {separate / computed:.2f}x")]


def _loss_rows(stale: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    worst = max(record["loss/staleness_max"] for record in stale if "loss/staleness_max" in record)
    last = [record for record in stale if record.get("loss/staleness_max") == worst][-1]
    return [
        ("loss", "largest staleness trained", f"{worst:.0f} versions"),
        (
            "loss",
            "A-3PO there: ratio, importance weight, clipped, capped",
            f"{last['loss/ratio_max']:.3f} max, {last['loss/importance_weight_max']:.3f} max, "
            f"{last['loss/clipped']:.3f}, {last['loss/capped']:.3f}",
        ),
    ]


def _group_rows(records: list[dict[str, Any]]) -> list[tuple[str, str, str]]:
    sizes = " ".join(str(record["group_size"]) for record in records)
    moves = [record["group/explanation"] for record in records if record.get("group/switched")]
    rows = [("group_controller", "G period by period", sizes)]
    return [*rows, ("group_controller", "the first move", moves[0] if moves else "none")]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
