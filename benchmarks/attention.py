"""Shared-prompt attention on a CPU against K separate rows and against PyPI's prefix-grouper, with the goals beside.

    python benchmarks/attention.py --out docs/results/attention.json
    python benchmarks/attention.py --section attention --repeats 9
    python benchmarks/attention.py --section model --shapes 512,4,64 --layers 4 --repeats 2

All ways of a section run in one process in turns, with one thread; times are CPU seconds of the process,
medians after one warm-up. The other side is the strongest one: rows of equal length without padding, the
kernel's native grouped heads, logits at response positions only. A section that isn't run keeps what
``--out`` holds of it. A shape is prompt,responses,response length.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
from attention_model import MODEL_SHAPES, log_probs_section, model_section, peak_of
from attention_ops import THEORY_SHAPES, attention_section, plan_section, saved_section

SECTIONS = ("attention", "memory", "model", "plan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--repeats", type=int, default=5, help="of the longest shapes; short ones run oftener")
    parser.add_argument("--model-repeats", type=int, default=3)
    parser.add_argument("--shapes", nargs="+", help="of the section model")
    parser.add_argument("--layers", type=int, help="cut the model to its first layers")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--peak-of", metavar="WHAT", help="only print the peak memory of one way, in bytes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shapes = MODEL_SHAPES
    if arguments.shapes:
        shapes = [tuple(int(part) for part in shape.split(",")) for shape in arguments.shapes]
    if arguments.peak_of:
        print(peak_of(arguments.peak_of, shapes[0], arguments.layers))
        return
    kept = json.loads(arguments.out.read_text()) if arguments.out and arguments.out.is_file() else {}
    found: dict[str, Any] = dict(kept.get("sections", {}))
    for section in arguments.section:
        if section == "attention":
            found[section] = {"repeats": arguments.repeats, "rows": attention_section(arguments.repeats)}
        elif section == "memory":
            found[section] = {"saved": saved_section(), "log_probs": log_probs_section()}
        elif section == "model":
            rows = model_section(shapes, arguments.model_repeats, arguments.layers)
            found[section] = {"repeats": arguments.model_repeats, "rows": rows}
        else:
            found[section] = plan_section(arguments.repeats)
        found[section]["machine"] = facts()
    goals = judged(found)
    print("\ngoals")
    for goal in goals:
        print(f"  {'met    ' if goal['met'] else 'NOT MET'} {goal['what']}: {goal['found']:.3f} (goal {goal['goal']})")
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        clock = "process CPU seconds, one thread, medians, ways of a section in turns"
        peak = "VmHWM after clear_refs less VmRSS before, a fresh process each"
        report = {"clock": clock, "peak": peak, "goals": goals, "sections": found}
        arguments.out.write_text(json.dumps(report, indent=2) + "\n")


def facts() -> dict[str, str]:
    """What the figures were measured with."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": names[0] if names else platform.machine(),
    }


def judged(sections: dict[str, Any]) -> list[dict[str, Any]]:
    """The goals of what was measured, each met or not."""
    goals: list[dict[str, Any]] = []

    def goal(what: str, found: float, least: float | None = None, most: float | None = None) -> None:
        met = found >= least if least is not None else most is not None and found <= most
        wanted = f"at least {least}" if least is not None else f"at most {most}"
        goals.append({"what": what, "found": found, "goal": wanted, "met": bool(met)})

    single = [row for row in sections.get("attention", {}).get("rows", []) if row["dtype"] == "float32"]
    for row in single:
        if tuple(row["shape"]) in THEORY_SHAPES:
            goal(f"attention at {named(row)}: rows/ours to its flop theory", row["to_theory"], least=1.0)
    if single:
        worst = min(single, key=lambda row: row["ratio"])
        goal(f"attention, worst of all shapes ({named(worst)}): rows/ours", worst["ratio"], least=1.0)
        worst = min((row for row in single if row["shape"][0] >= 512), key=lambda row: row["peer_to_ours"])
        goal(f"attention, worst with Lp >= 512 ({named(worst)}): faster peer/ours", worst["peer_to_ours"], least=1.1)
    for row in sections.get("memory", {}).get("saved", []):
        if row["shape"] == [2048, 8, 64]:
            goal(f"bytes saved at {named(row)}: ours/rows with native grouped heads", row["ours_to_rows"], most=0.15)
            repeated = row["ours_to_rows_repeated"]
            goal(f"bytes saved at {named(row)}: ours/rows with repeated keys and values", repeated, most=0.15)
    for row in sections.get("model", {}).get("rows", []):
        at = f"model at {named(row)}, {row['layers']} layers"
        goal(f"{at}: rows/ours to theory", row["ours"]["to_theory"], least=0.95)
        bound = f"{row['theory_logits_everywhere_to_ours']:.2f} by flops"
        goal(f"{at}: peer by its README/ours ({bound})", row["peer_readme"]["seconds_to_ours"], least=1.5)
        goal(f"{at}: leanest peer/ours", row["peer_lean"]["seconds_to_ours"], least=1.0)
        for way in ("peer_readme", "peer_lean"):
            ratio = row["ours"]["peak_bytes"] / row[way]["peak_bytes"]
            goal(f"{at}: peak memory, ours/{way}", ratio, most=1.0)
    if "plan" in sections:
        goal("a plan of 64 groups x 16 responses, ms", sections["plan"]["milliseconds"], most=5.0)
    return goals


def named(row: dict[str, Any]) -> str:
    return "(" + ",".join(str(part) for part in row["shape"]) + ")"


if __name__ == "__main__":
    main()
