"""docs/PATCHES-areal.md is what the records say; this file as a program writes it."""

from pathlib import Path

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

from metronome_areal.bind import PATCHES
from metronome_patches.ledger import ledger

PAGE = Path(__file__).parents[2] / "docs" / "PATCHES-areal.md"
OPENING = """\
Generated from the records in `adapters/metronome_areal` by `tests/areal_host/test_areal_patches_page.py`, which keeps
it current. Each is applied only in the AReaL releases that it names and only to an object that is what it expects;
anything else stops with an error. All of them stand in a process that `python -m metronome_areal` starts, and nowhere
else: AReaL's workers have none, nor does a script that imports `PPOTrainer` and `GRPOConfig` from `metronome_areal`.

Everything else is a subclass of AReaL's classes, which its trainer makes through methods of its own. What they call
and override is looked at before a run starts (`adapters/metronome_areal/host.py`)."""


def page():
    return ledger(PATCHES, "AReaL", OPENING)


def test_the_page_is_what_the_records_say():
    assert PAGE.read_text(encoding="utf-8") == page()


def test_a_patch_stands_there_once():
    targets = [patch.target for patch in PATCHES]
    assert len(set(targets)) == len(targets)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
