"""The same work once per value of a key, and a table of ratios."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from metronome.recipes import override
from metronome_local.progress import read_jsonl


def compare_runs(recipe: dict[str, Any], vary: tuple[str, list[str]], *, where: str, output: str | None) -> int:
    """Runs the recipe once per value of ``vary[0]``, one after the other with the same seed and prompts.

    Every variant is validated before the first one starts. Options of plug-ins that a variant doesn't select
    stay in its recipe and are ignored. Writes ``compare.json`` beside the run folders.
    """
    from metronome_local.build import build
    from metronome_local.host import default_folder, train
    from metronome_local.validation import validate

    key, values = vary
    variants = [override(recipe, f"{key}={value}", "--vary") for value in values]
    validated = [validate(variant, where, comparing=True) for variant in variants]
    console = Console()
    root = Path(output) if output else default_folder(f"{Path(where).stem}-compare")
    folders = []
    for value, (parsed, settings, selection, device) in zip(values, validated, strict=True):
        console.rule(f"{key} = {value}")
        folder = root / f"{key.rsplit('.', 1)[-1]}-{_file_name(value)}"
        trainer = build(parsed, settings, selection, device, folder, console, base=Path(where).parent)
        try:
            train(trainer, console)
        finally:
            trainer.close()
            trainer.parts.progress.close()
        if trainer.interrupted:
            return 130
        folders.append(folder)
    summaries = [summary(folder) for folder in folders]
    table = ratio_table(key, values, summaries)
    console.print(table)
    for value, folder in zip(values[1:], folders[1:], strict=True):
        console.print(_first_difference(values[0], folders[0], value, folder), highlight=False, soft_wrap=True)
    (root / "compare.json").write_text(
        json.dumps({"key": key, "variants": dict(zip(values, summaries, strict=True))}, indent=2)
    )
    console.print(f"run folders and compare.json: {root}", highlight=False, soft_wrap=True)
    return 0


def summary(folder: Path) -> dict[str, Any]:
    """Medians and totals of a run folder's periods; the first period (warm-up) is left out of the medians."""
    records = read_jsonl(folder / "metrics.jsonl")
    periods = [record for record in records if "seconds" in record]
    accuracies = [record["held_out_accuracy"] for record in records if "held_out_accuracy" in record]
    steady = periods[1:] or periods
    computed = sum(record["tokens_computed"] for record in periods)
    return {
        "periods": len(periods),
        "period_seconds": statistics.median(record["seconds"] for record in steady),
        "waiting_share": sum(r["seconds_waiting"] for r in steady) / sum(r["seconds"] for r in steady),
        "tpspd": statistics.median(record["tpspd"] for record in steady),
        "tokens": sum(record["tokens"] for record in steady),
        "seconds": sum(record["seconds"] for record in steady),
        "rollouts": sum(record["group_size"] * record["prompts"] for record in periods),
        "shared": sum(record["tokens_separate"] for record in periods) / max(1, computed),
        "staleness_max": max((record.get("loss/staleness_max", 0.0) for record in periods), default=0.0),
        "reward_first": periods[0]["reward"],
        "reward_last": statistics.fmean(record["reward"] for record in periods[-3:]),
        "accuracy_first": accuracies[0] if accuracies else None,
        "accuracy_last": accuracies[-1] if accuracies else None,
    }


def ratio_table(key: str, values: list[str], summaries: list[dict[str, Any]]) -> Table:
    """One row a variant; ratios are against the first (larger is faster)."""
    table = Table(title=f"{key}, against {values[0]}", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in ("", "period s", "speed", "per token", "shared", "stale", "reward", "held-out"):
        table.add_column(column, justify="right" if table.columns else "left", no_wrap=True)
    base = summaries[0]
    for value, one in zip(values, summaries, strict=True):
        held = "-" if one["accuracy_last"] is None else f"{one['accuracy_first']:.2f} > {one['accuracy_last']:.2f}"
        table.add_row(
            value,
            f"{one['period_seconds']:.2f}",
            f"{base['period_seconds'] / one['period_seconds']:.2f}x",
            f"{(base['seconds'] / max(1, base['tokens'])) / (one['seconds'] / max(1, one['tokens'])):.2f}x",
            f"{one['shared']:.2f}x",
            f"{one['staleness_max']:.0f}",
            f"{one['reward_first']:.2f} > {one['reward_last']:.2f}",
            held,
        )
    return table


def _first_difference(name: str, folder: Path, other_name: str, other: Path) -> str:
    """Says at which period the sampled texts of two runs part, or that they never do."""
    texts = {(r["period"], r["index"]): r["texts"] for r in read_jsonl(folder / "groups.jsonl")}
    differing = [
        record["period"]
        for record in read_jsonl(other / "groups.jsonl")
        if texts.get((record["period"], record["index"])) != record["texts"]
    ]
    if not differing:
        return f"{name} and {other_name}: every rollout of every period is the same"
    return (
        f"{name} and {other_name}: the first period in which a rollout differs is {min(differing)} "
        f"(batch composition changes rounding, and so sampling; the gradient for the same rollouts is the same)"
    )


def _file_name(value: str) -> str:
    return "".join(c if c.isalnum() or c in "-." else "_" for c in value)
