"""docs/PATCHES-openrlhf.md is what the records say; this file as a program writes it."""

from pathlib import Path

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need OpenRLHF (requirements/openrlhf.txt)")

from metronome_openrlhf.bind import ARGUMENTS
from metronome_openrlhf.cpu.patches import PATCHES
from metronome_patches.ledger import ledger

PAGE = Path(__file__).parents[2] / "docs" / "PATCHES-openrlhf.md"
OPENING = """\
Generated from the records in `adapters/metronome_openrlhf` by `tests/openrlhf_host/test_openrlhf_patches_page.py`,
which keeps it current. Each is applied only in the OpenRLHF releases that it names and only to an object that is what
it expects; anything else stops with an error. The first stands in every run that the launcher starts, the others in the
CPU room alone.

OpenRLHF has no registries. Its classes that are ours in a run are subclasses of its own, put in their place by
`adapters/metronome_openrlhf/bind.py` in the launching process; inside a worker they put theirs where their base looks
them up. What they call and override is looked at before a run starts (`host.py`)."""


def page():
    return ledger((ARGUMENTS, *PATCHES), "OpenRLHF", OPENING)


def test_the_page_is_what_the_records_say():
    assert PAGE.read_text(encoding="utf-8") == page()


def test_a_patch_stands_there_once():
    targets = [patch.target for patch in (ARGUMENTS, *PATCHES)]
    assert len(set(targets)) == len(targets)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
