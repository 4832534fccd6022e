"""A plug-in in a distribution of its own is found by name, chosen from a block, and held to the contracts."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml

from metronome.cli import main
from metronome.device import Device
from metronome.errors import ConfigurationError
from metronome.plugins import Selection, offered_names, offers, plugin_manager, resolve
from metronome.settings import parse_settings
from metronome.testing.group_controller import check_group_controller
from metronome.testing.policy_loss import check_policy_loss

ROOT = Path(__file__).parents[2]
BLOCK = {
    "loss": "reinforce",
    "group_controller": "alternating",
    "reinforce": {"cap": 3.0},
    "alternating": {"sizes": [4, 8, 2]},
}


@pytest.fixture(scope="module", autouse=True)
def _installed() -> None:
    if "example" not in {point.name for point in entry_points(group="metronome")}:
        pytest.fail("metronome-example-plugin isn't installed: make test installs it")


def selected(block: dict[str, Any]) -> Selection:
    manager = plugin_manager({})
    return resolve(parse_settings(block, offered_names(manager)), Device("cpu", "gloo"), 0, manager)


def test_the_package_is_listed_with_its_own_distribution() -> None:
    found = {one.offer.name: one for one in offers(plugin_manager({})) if one.plugin == "example"}
    assert set(found) == {"reinforce", "alternating"}
    assert {one.distribution for one in found.values()} == {"metronome-example-plugin 0.1.0"}
    assert found["reinforce"].offer.options == {"cap": 2.0}
    assert found["alternating"].offer.options == {"sizes": (4, 8)}


def test_the_package_is_chosen_by_name_beside_the_shipped_ones() -> None:
    selection = selected(BLOCK)
    assert type(selection.loss).__module__ == "metronome_example.reinforce"
    assert selection.loss.cap == 3.0
    assert type(selection.group_controller).__module__ == "metronome_example.alternating"
    assert [selection.group_controller.size(), selection.group_controller.largest()] == [4, 8]
    assert selection.rollout_source.name == "synchronous"


@pytest.mark.parametrize(
    ("name", "options", "part"),
    [
        ("reinforce", {"cpa": 1}, "use 'cap'"),
        ("reinforce", {"cap": "high"}, "metronome.reinforce.cap"),
        ("alternating", {"sizes": [1]}, "none below 2"),
    ],
)
def test_its_options_are_validated(name: str, options: dict[str, Any], part: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        selected({**BLOCK, name: options})
    assert part in str(error.value)


def test_the_package_is_chosen_from_a_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"host": "local", "metronome": BLOCK}), encoding="utf-8")
    assert main(["run", str(path), "metronome.alternating.sizes=[6,2]", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "loss: reinforce" in printed
    assert "group size 6" in printed
    assert main(["run", str(path), "metronome.reinforce.cpa=3", "--dry-run"]) == 2
    assert "in metronome.reinforce; to mend: use 'cap'" in capsys.readouterr().err


def test_its_own_tests_pass() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/thirdparty"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ".." in ran.stdout


def test_its_loss_keeps_the_contract() -> None:
    check_policy_loss(selected(BLOCK).loss)


def test_its_controller_keeps_the_contract() -> None:
    check_group_controller(selected(BLOCK).group_controller, make=lambda: selected(BLOCK).group_controller)


def test_its_controller_takes_its_sizes_in_turn() -> None:
    controller = selected(BLOCK).group_controller
    sizes = []
    for _ in range(5):
        sizes.append(controller.size())
        controller.observe(None)  # type: ignore[arg-type]
    assert sizes == [4, 8, 2, 4, 8]
