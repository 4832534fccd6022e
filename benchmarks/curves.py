"""Learning curves of run folders in one picture and one JSON.

    python benchmarks/curves.py seed0=runs/learn-0 seed1=runs/learn-1 --out docs/results/learn

writes learn.png and learn.json: rewards by period, held-out accuracies, seconds of each period and their sum.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from metronome_local.progress import read_jsonl


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="LABEL=FOLDER")
    parser.add_argument("--out", required=True, help="path without ending")
    parser.add_argument("--title", default="")
    arguments = parser.parse_args()
    curves = {label: curve(Path(folder)) for label, folder in (run.split("=", 1) for run in arguments.runs)}
    Path(f"{arguments.out}.json").write_text(json.dumps(curves) + "\n")
    draw(curves, arguments.title, f"{arguments.out}.png")
    for label, one in curves.items():
        accuracies = " ".join(f"{accuracy:.2f}@{period}" for period, accuracy in one["held_out"])
        print(f"{label}: {len(one['reward'])} periods, {one['seconds']:.0f} s of periods; held-out {accuracies}")
    return 0


def curve(folder: Path) -> dict[str, Any]:
    records = read_jsonl(folder / "metrics.jsonl")
    periods = [record for record in records if "seconds" in record]
    return {
        "reward": [round(record["reward"], 4) for record in periods],
        "exact": [round(record["exact"], 4) for record in periods],
        "held_out": [[r["period"], r["held_out_accuracy"]] for r in records if "held_out_accuracy" in r],
        "group_size": [record["group_size"] for record in periods],
        "period_seconds": [round(record["seconds"], 3) for record in periods],
        "seconds": round(sum(record["seconds"] for record in periods), 1),
    }


def draw(curves: dict[str, dict[str, Any]], title: str, path: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    styles = [("-", 3.0), ("--", 1.8), (":", 1.8), ("-.", 1.8)]  # curves that coincide are all to be seen
    for number, (label, one) in enumerate(curves.items()):
        linestyle, linewidth = styles[number % len(styles)]
        look = {"label": label, "linestyle": linestyle, "linewidth": linewidth}
        left.plot(range(1, len(one["reward"]) + 1), one["reward"], **look)
        if one["held_out"]:
            right.plot(*zip(*one["held_out"], strict=True), marker="o", **look)
    left.set(xlabel="period", ylabel="mean reward of the rollouts", ylim=(0, 1.05))
    right.set(xlabel="period", ylabel="held-out exact accuracy (greedy)", ylim=(0, 1.05))
    left.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
