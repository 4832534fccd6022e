"""The schema of a recipe for AReaL."""

from __future__ import annotations

from typing import Literal

from metronome.overlays import LayeredRecipe


class Recipe(LayeredRecipe):
    """A recipe for AReaL.

    ``args`` are keys of AReaL's configuration over those in ``script.yaml``, nested or dotted, and ``script.reward``,
    ``script.keep`` and ``script.enable_thinking`` (``script.py``); a null is AReaL's null. ``assets`` is a folder with
    ``model``, ``prompts.jsonl`` (``messages``, ``answer``) and ``tiny_reward.py`` (``reward``).
    """

    host: Literal["areal"]
