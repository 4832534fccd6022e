"""How each host takes a key of the ``metronome:`` block on its command line (docs/local.md, verl.md and so on)."""

from __future__ import annotations

from collections.abc import Sequence

Keys = Sequence[tuple[str, str]]

_FORMS = {
    "local": "metronome.{key}={value}",
    "verl": "+metronome.{key}={value}",
    "openrlhf": "--metronome.{key} {value}",
    "areal": "metronome.{key}={value}",
    "csv": "metronome.{key}={value}",
}
BESIDE = {
    "local": "flags go behind metronome run RECIPE",
    "verl": "flags go behind verl's own, with trainer.v1.trainer_mode=metronome",
    "openrlhf": "flags go behind python -m metronome_openrlhf and OpenRLHF's own",
    "areal": "flags go behind python -m metronome_areal SCRIPT --config FILE",
    "csv": "a CSV names no host: the flags are keys of a recipe's metronome block",
}
"""Host -> where its flags go."""


def flag(host: str, keys: Keys) -> str:
    """``keys`` of the block as ``host`` takes them; nothing without keys."""
    return " ".join(_FORMS[host].format(key=key, value=value) for key, value in keys)


def refusal(host: str, source: str, budget: str) -> str | None:
    """Why ``host`` refuses sagc with this ``budget`` beside this rollout source; None if it takes it."""
    if source == "bounded" and host == "openrlhf":
        return "OpenRLHF refuses sagc in bounded mode"
    if source == "bounded" and host == "verl" and budget == "fixed_rollouts":
        return "verl in bounded mode needs metronome.sagc.budget=fixed_prompts"
    return None
