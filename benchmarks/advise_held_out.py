"""Advice held out: the gain predicted from a recorded run for a configuration that wasn't run, against its measurement.

    python benchmarks/advise_held_out.py --out docs/results/advise.json

One process of the local host (benchmarks/overlap.yaml, trainer and worker on a core each) runs each round's prompts
under four configurations, in alternating order: synchronous, periodic, synchronous with half of G, synchronous with
separate prompts. Seeds and lengths are the prompts' own, so that the work is the same. Each configuration's periods
make a record of their own. Then a gain is predicted from one record alone and compared with the ratio of the measured
seconds of the two. The first round warms up and isn't recorded. Exit code 1 if a schedule's
prediction is over 10 % off; the other two kinds are shown.

Other processes don't only add noise: they find the core that a synchronous run leaves idle, and none beside a periodic
one. So each period's share of the machine that others took is measured, and a round with more than 10 % isn't counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from metronome.advise.model import predicted
from metronome.observe.readers import read_run
from metronome.observe.records import RunRecord
from metronome.recipes import load_recipe
from metronome.simulate.policy import Policy

RECIPE = str(Path(__file__).with_name("overlap.yaml"))
TOLERANCE = 0.10
UNDISTURBED = 0.10
"""Share of the machine that others may take in a period."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What differs from ``overlap.yaml``."""

    source: str = "synchronous"
    size: int = 4
    attention: str = "shared_prompt"

    def keys(self, prompts: int) -> list[str]:
        """As overrides of the recipe."""
        return [
            f"metronome.rollout_source={self.source}",
            f"metronome.fixed.size={self.size}",
            f"metronome.attention={self.attention}",
            f"training.prompts={prompts}",
        ]


CONFIGURATIONS = {
    "synchronous": Configuration(),
    "periodic": Configuration(source="periodic"),
    "half_group": Configuration(size=2),
    "separate_prompts": Configuration(attention="host"),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A prediction: ``policy`` (and G) from the record of ``known``, measured by ``held_out``.

    ``promised``: held to the tolerance. The others are shown: they change what is trained, and one record whose groups
    are alike hardly tells what a pass costs whatever its tokens, nor what another attention would; their gains come out
    too large.
    """

    known: str
    held_out: str
    policy: Policy
    group_size: int | None = None
    promised: bool = False


PAIRS = (
    Pair("synchronous", "periodic", Policy(source="periodic", shared_prompt=True), promised=True),
    Pair("periodic", "synchronous", Policy(source="synchronous", shared_prompt=True), promised=True),
    Pair("synchronous", "half_group", Policy(source="synchronous", shared_prompt=True), group_size=2),
    Pair("separate_prompts", "synchronous", Policy(source="synchronous", shared_prompt=True)),
    Pair("separate_prompts", "periodic", Policy(source="periodic", shared_prompt=True)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=int, default=20, help="rounds to run at most until so many were undisturbed")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--folder", default=f"runs/advise-{time.strftime('%Y%m%d-%H%M%S')}")
    parser.add_argument("--again", action="store_true", help="take the records that lie in --folder already")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    folder = Path(arguments.folder)
    if not arguments.again:
        record(folder, arguments.rounds, arguments.prompts, arguments.most)
    records = {name: read_run(folder / name) for name in CONFIGURATIONS}
    results = [compare(pair, records) for pair in PAIRS]
    for one in results:
        print(
            f"{one['held_out']} predicted from {one['known']}: {one['predicted']:.3f}x "
            f"({one['low']:.3f} to {one['high']:.3f}), measured {one['measured']:.3f}x, {100 * one['off']:+.1f} % off"
            + ("" if one["promised"] else " (shown, not promised)")
        )
    if arguments.out:
        figures = {
            "command": "python benchmarks/advise_held_out.py " + " ".join(sys.argv[1:]),
            "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
            "others_share_of_the_machine": json.loads((folder / "others.json").read_text()),
            "tolerance": TOLERANCE,
            "pairs": results,
            "seconds": {name: [step.seconds for step in run.steps] for name, run in records.items()},
        }
        Path(arguments.out).write_text(json.dumps(figures, indent=2) + "\n")
    return int(any(one["promised"] and abs(one["off"]) > TOLERANCE for one in results))


def record(folder: Path, rounds: int, prompts: int, most: int) -> None:
    """Runs all configurations side by side until ``rounds`` were undisturbed; leaves a run folder of each."""
    import yaml
    from rich.console import Console

    from metronome.sagc.fixed import Fixed, FixedOptions
    from metronome_local.build import build
    from metronome_local.logprobs import log_probs_of
    from metronome_local.validation import validate

    loaded = {name: load_recipe(RECIPE, one.keys(prompts)) for name, one in CONFIGURATIONS.items()}
    validated = {name: validate(recipe, RECIPE, comparing=True) for name, recipe in loaded.items()}
    parsed, settings, selection, device = validated["synchronous"]
    console = Console(file=sys.stderr)
    trainer = build(parsed, settings, selection, device, folder / "all", console, base=Path(RECIPE).parent)
    log_probs = {
        name: log_probs_of(trainer.parts.model, one[2].attention, parsed.sampling.temperature, parsed.model.dtype)
        for name, one in validated.items()
    }
    whose: dict[int, str] = {}
    shares: list[dict[str, float]] = []
    try:
        trainer.start()
        for number in range(most + 1):
            names = [*CONFIGURATIONS][:: -1 if number % 2 else 1]
            others, periods = {}, {}
            for name in names:
                trainer.use(validated[name][2].rollout_source)
                state = {**trainer.stream.state_dict(), "next_index": number * prompts, "pending": []}
                trainer.stream.close()
                trainer.stream = trainer._stream()
                trainer.stream.load_state_dict(state)
                trainer.controller = Fixed(FixedOptions(size=CONFIGURATIONS[name].size))
                trainer.parts.gradient.log_probs = log_probs[name]
                before = Usage.now()
                trainer.run_period()
                others[name], periods[trainer.history[-1]["period"]] = Usage.now().others_since(before), name
            print({name: round(share, 3) for name, share in others.items()}, file=sys.stderr)
            if number and max(others.values()) <= UNDISTURBED:
                whose |= periods
                shares.append(others)
            if len(shares) == rounds:
                break
    finally:
        trainer.close()
        trainer.parts.progress.close()
    if len(shares) < rounds:
        raise SystemExit(f"{len(shares)} of {most} rounds were undisturbed, not {rounds}: the machine is too busy")
    (folder / "others.json").write_text(json.dumps(shares) + "\n")
    for name, one in validated.items():
        own = folder / name
        own.mkdir(parents=True)
        (own / "recipe.yaml").write_text(yaml.safe_dump(one[0].model_dump(mode="json"), sort_keys=False))
        for file in ("metrics.jsonl", "groups.jsonl"):
            lines = (folder / "all" / file).read_text().splitlines(keepends=True)
            (own / file).write_text("".join(line for line in lines if whose.get(json.loads(line)["period"]) == name))


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds of processor time since boot: of everything, and of this process and its children; and the clock."""

    everything: float
    own: float
    clock: float

    @classmethod
    def now(cls) -> Usage:
        """From Linux' /proc."""
        tick = os.sysconf("SC_CLK_TCK")
        user, nice, system, _, _, irq, soft, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
        own = 0
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended meanwhile
            if int(path.parent.name) == os.getpid() or int(fields[1]) == os.getpid():
                own += int(fields[11]) + int(fields[12])
        return cls((user + nice + system + irq + soft) / tick, own / tick, time.monotonic())

    def others_since(self, before: Usage) -> float:
        """Share of all cores that others took since ``before``."""
        took = self.everything - before.everything - (self.own - before.own)
        return max(0.0, took / (self.clock - before.clock) / (os.cpu_count() or 1))


def compare(pair: Pair, records: dict[str, RunRecord]) -> dict[str, Any]:
    """Prediction against measurement, both as ratios of mean seconds a step."""
    known, held_out = records[pair.known], records[pair.held_out]
    found = predicted(known, pair.policy, group_size=pair.group_size)
    measured = fmean(step.seconds for step in known.steps) / fmean(step.seconds for step in held_out.steps)
    return {
        "known": pair.known,
        "held_out": pair.held_out,
        "predicted": found.value,
        "low": found.low,
        "high": found.high,
        "measured": measured,
        "promised": pair.promised,
        "off": found.value / measured - 1.0,
    }


if __name__ == "__main__":
    sys.exit(main())
