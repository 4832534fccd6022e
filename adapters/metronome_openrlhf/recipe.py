"""The schema of a recipe for OpenRLHF."""

from __future__ import annotations

from typing import Literal

from metronome.overlays import LayeredRecipe


class Recipe(LayeredRecipe):
    """A recipe for OpenRLHF.

    ``args`` are the flags of ``openrlhf.cli.train_ppo_ray`` without their dashes: true is a flag without a value, a
    list is several values, null or false leaves the flag out. ``assets`` is a folder with ``model``, ``prompts.jsonl``
    (``input``, ``label``) and ``reward.py`` (``reward_func``).
    """

    host: Literal["openrlhf"]
