"""``import metronome`` is quick, and nothing that a user of the command line waits for imports torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROBE = """
import json, sys, time
start = time.perf_counter()
{statement}
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted({{"torch", "transformers", "numpy"}} & set(sys.modules))]))
"""
HEAVY = {"torch", "transformers"}


def probe(statement: str) -> tuple[float, set[str]]:
    """Seconds that ``statement`` takes in a fresh interpreter, and the heavy modules loaded after it."""
    process = subprocess.run(
        [sys.executable, "-c", PROBE.format(statement=statement)], capture_output=True, text=True, check=True
    )
    seconds, loaded = json.loads(process.stdout)
    return seconds, set(loaded)


def test_import_metronome_takes_under_150_ms_and_no_torch() -> None:
    best, loaded = min((probe("import metronome") for _ in range(5)), key=lambda result: result[0])
    assert not loaded & HEAVY
    assert best < 0.150, f"best of five: {best * 1000:.0f} ms"


@pytest.mark.parametrize(
    "statement",
    [
        "import metronome.cli",
        "import metronome.recipes, metronome.doctor, metronome.settings, metronome.plugins",
        "import metronome.periodic, metronome.sagc",
        "import metronome.plugins as p; p.offers(p.plugin_manager({}))",
        "import metronome.cli; metronome.cli.main(['--version'])",
    ],
)
def test_the_core_the_command_line_and_listing_the_plugins_import_no_torch(statement: str) -> None:
    silent = f"import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()):\n    {statement}"
    _, loaded = probe(silent)
    assert not loaded & HEAVY


def test_the_probe_sees_what_is_loaded() -> None:
    seconds, loaded = probe("import numpy; time.sleep(0.2)")
    assert loaded == {"numpy"}
    assert seconds > 0.2
