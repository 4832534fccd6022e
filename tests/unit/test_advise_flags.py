"""The flag for each host stands in that host's page, and the settings take it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from advise_runs import made, row

from metronome.advise.advise import advise
from metronome.advise.flags import BESIDE, flag, refusal
from metronome.plugins import offers, plugin_manager
from metronome.recipes import override
from metronome.settings import SELECTORS, parse_settings

pytest.importorskip("simpy")

DOCS = Path(__file__).resolve().parents[2] / "docs"
HOSTS = ("local", "verl", "openrlhf", "areal")
FORM = {"local": r"metronome\.", "verl": r"\+metronome\.", "openrlhf": r"--metronome\.", "areal": r"metronome\."}


def of_host(host):
    run = made("synchronous")
    return advise(replace(run, host=host))


@pytest.mark.parametrize("host", HOSTS)
def test_each_flag_stands_in_the_hosts_page(host):
    """As ``KEY=VALUE``, in the page's table, or in options.md by the page's general form."""
    page = (DOCS / f"{host}.md").read_text(encoding="utf-8")
    options = (DOCS / "options.md").read_text(encoding="utf-8")
    separator = " " if host == "openrlhf" else "="
    for one in of_host(host).rows:
        assert one.flag
        parts = re.split(r" (?=--)", one.flag) if host == "openrlhf" else one.flag.split()
        for part in parts:
            assert re.match(FORM[host], part)
            key, value = part.split(separator, 1)
            name = re.sub(FORM[host], "", key)
            if name in SELECTORS:
                here = f"{key}{separator}{value}" in page or f"`{name}={value}" in page
                listed = re.search(rf"\| `{name}` \|.*`{value}`", options) and "(options.md)" in page
                assert here or listed, (host, part)
            else:
                plugin, option = name.split(".")
                assert f"### {plugin}" in options
                assert f"| `{option}` |" in options.split(f"### {plugin}\n")[1].split("\n##")[0]
                general = ("metronome.PLUGIN.OPTION", f"metronome.{plugin}.", "options.md")
                assert any(form in page for form in general)


@pytest.mark.parametrize("host", HOSTS)
def test_each_flag_is_a_setting_that_is_taken(host):
    offered = {one.offer.name for one in offers(plugin_manager())}
    for one in of_host(host).rows:
        block = {}
        parts = re.split(r" (?=--)", one.flag) if host == "openrlhf" else one.flag.split()
        for part in parts:
            plain = re.sub(r"^(\+|--)?metronome\.", "", part)
            block = override(block, plain.replace(" ", "=", 1) if host == "openrlhf" else plain)
        settings = parse_settings(block, offered)
        for plugin in settings.options:
            assert plugin in {getattr(settings, key) for key in SELECTORS}


def test_where_flags_go_is_said_for_every_host():
    assert set(BESIDE) == {*HOSTS, "csv"}
    page = (DOCS / "verl.md").read_text(encoding="utf-8")
    assert "trainer.v1.trainer_mode=metronome" in page
    assert "trainer.v1.trainer_mode=metronome" in BESIDE["verl"]
    assert "python -m metronome_openrlhf" in (DOCS / "openrlhf.md").read_text(encoding="utf-8")
    assert "python -m metronome_areal" in (DOCS / "areal.md").read_text(encoding="utf-8")


def test_flags_have_the_hosts_own_form():
    keys = (("loss", "a3po"), ("sagc.sizes", "[2,4]"))
    assert flag("verl", keys) == "+metronome.loss=a3po +metronome.sagc.sizes=[2,4]"
    assert flag("openrlhf", keys) == "--metronome.loss a3po --metronome.sagc.sizes [2,4]"
    assert flag("areal", keys) == "metronome.loss=a3po metronome.sagc.sizes=[2,4]"
    assert flag("local", ()) == ""


def test_what_a_host_refuses_is_not_advised():
    """docs/openrlhf.md refuses sagc in bounded mode; verl's bounded mode wants fixed_prompts."""
    run = made("synchronous")
    run = replace(run, source="bounded", host="openrlhf", settings={**run.settings, "staleness": 2})
    advice = advise(run)
    assert row(advice, "sagc_fixed_prompts").verdict == "refused"
    assert row(advice, "together").verdict != "refused"  # it is periodic
    assert refusal("verl", "bounded", "fixed_rollouts")
    assert refusal("verl", "bounded", "fixed_prompts") is None
    assert refusal("local", "bounded", "fixed_rollouts") is None
    verl = (DOCS / "verl.md").read_text(encoding="utf-8")
    assert "`metronome.sagc.budget=fixed_prompts`" in verl
    assert "`--metronome.group_controller sagc` in bounded mode" in (DOCS / "openrlhf.md").read_text(encoding="utf-8")


def test_the_sizes_for_sagc_never_go_above_the_runs_own_group():
    assert "metronome.sagc.sizes=[2,4]" in row(advise(made("synchronous", size=4)), "sagc_fixed_prompts").flag
    assert "metronome.sagc.sizes=[2,4,8]" in row(advise(made("synchronous", size=8)), "sagc_fixed_prompts").flag
    smallest = row(advise(made("synchronous", size=2)), "sagc_fixed_prompts")
    assert smallest.gain is None
    assert "no smaller size is left" in smallest.why


def test_what_changes_the_gradient_is_said():
    advice = advise(made("synchronous"))
    for one in advice.rows:
        assert one.changes_gradient == (one.key not in ("periodic", "shared_prompt"))
        assert ("same gradient" in one.changes) != one.changes_gradient
