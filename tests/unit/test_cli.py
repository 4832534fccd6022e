"""The command line: one line and the right exit code for every error, traceback only for faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from metronome import cli, doctor, hookimpl, plugins, recipes
from metronome.cli import main
from metronome.contracts import Offer
from metronome.errors import ConfigurationError, MetronomeError, WaitTimeout

fake_host = types.ModuleType("fake_host")


class Point:
    def __init__(self, name: str, loaded: object, distribution: str = "example-distribution") -> None:
        self.name, self.module, self.loaded, self.value = name, "fake_host", loaded, "fake_host"
        self.dist = types.SimpleNamespace(name=distribution, version="1.2")

    def load(self) -> object:
        if isinstance(self.loaded, BaseException):
            raise self.loaded
        return self.loaded


class Host:
    """Records its calls, raises or returns what a test asks for."""

    def __init__(self, outcome: int | BaseException = 0) -> None:
        self.outcome, self.calls = outcome, []

    def run(self, recipe: dict[str, Any], **options: Any) -> int:
        return self._done("run", recipe, options)

    def compare(self, recipe: dict[str, Any], vary: tuple[str, list[str]], **options: Any) -> int:
        return self._done("compare", recipe, {"vary": vary, **options})

    def _done(self, *call: Any) -> int:
        self.calls.append(call)
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def plugin() -> types.ModuleType:
    module = types.ModuleType("fake_plugin")

    @hookimpl
    def describe() -> list[Offer]:
        return [Offer("policy_loss", "plain", "a [bold]loss[/bold]", {"cap": 5.0, "mode": "mask"})]

    module.describe = describe  # type: ignore[attr-defined]
    return module


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Entry points by group; a test changes them."""
    groups: dict[str, list[Any]] = {"metronome": [Point("one", plugin())], "metronome.hosts": []}
    for module in (plugins, recipes, doctor):
        monkeypatch.setattr(module, "entry_points", lambda group: groups[group])
    for variable in ("DISABLE_PLUGINS", "LOAD_PLUGINS", "TRACE_PLUGINS", "TRACEBACK"):
        monkeypatch.delenv(f"METRONOME_{variable}", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return groups


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    path.write_text("host: example\nlr: 1\n", encoding="utf-8")
    return str(path)


def use(installed: dict[str, list[Any]], outcome: int | BaseException = 0) -> Host:
    host = Host(outcome)
    installed["metronome.hosts"] = [Point("example", host)]
    return host


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("metronome: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_run_hands_the_recipe_to_its_host(installed: Any, recipe: str) -> None:
    host = use(installed)
    arguments = ["lr=2e-5", "--dry-run", "a.b=c", "--output", "there", "--resume", "here", "--smoke"]
    assert main(["run", recipe, *arguments]) == 0
    expected = {"where": recipe, "output": "there", "resume": "here", "dry_run": True, "smoke": True}
    assert host.calls == [("run", {"host": "example", "lr": 2e-5, "a": {"b": "c"}}, expected)]


def test_run_without_options_leaves_them_out(installed: Any, recipe: str) -> None:
    host = use(installed)
    assert main(["run", recipe]) == 0
    assert host.calls[0][2] == {"where": recipe, "output": None, "resume": None, "dry_run": False, "smoke": False}


def test_compare_hands_the_varied_key_to_the_host(installed: Any, recipe: str) -> None:
    host = use(installed)
    assert main(["compare", recipe, "--vary", "lr=1,2", "x=3"]) == 0
    expected = {"vary": ("lr", ["1", "2"]), "where": recipe, "output": None}
    assert host.calls == [("compare", {"host": "example", "lr": 1, "x": 3}, expected)]


@pytest.mark.parametrize("code", [0, 1, 3])
def test_the_host_s_exit_code_is_the_command_s(installed: Any, recipe: str, code: int) -> None:
    use(installed, code)
    assert main(["run", recipe]) == code
    assert main(["compare", recipe, "--vary", "lr=1,2"]) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (
            ConfigurationError("G is too small", found=1, where="recipe: group_size", remedy="group_size: 8"),
            2,
        ),
        (WaitTimeout("no group from worker 1 within 60 s"), 1),
        (MetronomeError("first\nsecond line"), 1),
    ],
)
def test_an_error_is_one_line_with_its_exit_code(
    installed: Any, recipe: str, capsys: pytest.CaptureFixture[str], error: MetronomeError, code: int
) -> None:
    use(installed, error)
    assert main(["run", recipe]) == code
    assert error_line(capsys) == f"metronome: error: {error}\n"


def test_a_traceback_is_shown_when_it_is_asked_for(
    installed: Any, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(installed, ConfigurationError("G is too small"))
    monkeypatch.setenv("METRONOME_TRACEBACK", "1")
    with pytest.raises(ConfigurationError):
        main(["run", recipe])


def test_ctrl_c_is_one_line_and_130(installed: Any, recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    use(installed, KeyboardInterrupt())
    assert main(["run", recipe]) == 130
    assert error_line(capsys) == "metronome: error: interrupted\n"


@pytest.mark.parametrize("fault", [ZeroDivisionError("a bug"), EOFError("a bug"), BrokenPipeError(32, "a bug")])
def test_a_fault_shows_its_traceback(installed: Any, recipe: str, fault: Exception) -> None:
    use(installed, fault)
    with pytest.raises(type(fault)):
        main(["run", recipe])


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["rnu"], "rnu"),
        (["run"], "RECIPE"),
        (["run", "x.yaml", "--frobnicate"], "--frobnicate"),
        (["compare", "x.yaml"], "--vary"),
        (["plugins", "extra"], "extra"),
        (["run", "x.yaml", "--output"], "--output"),
        (["run", "no-such-file.yaml"], "no-such-file.yaml"),
        (["compare", "x.yaml", "--vary", "lr"], "--vary"),
    ],
)
def test_wrong_usage_is_one_line_and_2(
    installed: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], part: str
) -> None:
    assert main(arguments) == 2
    assert part in error_line(capsys)


@pytest.mark.parametrize(
    ("assignment", "part"),
    [("lr", "must read key=value"), ("lr.x=1", "isn't a mapping"), ("host=exmple", "use 'example'")],
)
def test_a_wrong_override_is_one_line_and_2(
    installed: Any, recipe: str, capsys: pytest.CaptureFixture[str], assignment: str, part: str
) -> None:
    host = use(installed)
    assert main(["run", recipe, assignment]) == 2
    assert part in error_line(capsys)
    assert host.calls == []


def test_a_host_without_its_extra_is_one_line_and_2(
    installed: Any, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ModuleNotFoundError("No module named 'torch'", name="torch")
    installed["metronome.hosts"] = [Point("example", missing, "metronome-rl")]
    assert main(["run", recipe]) == 2
    assert 'pip install "metronome-rl[example]"' in error_line(capsys)


def test_help_and_version_succeed(installed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("metronome 0.")
    for arguments in ([], ["--help"], ["run", "--help"]):
        assert main(arguments) == 0
        assert "Usage" in capsys.readouterr().out


def test_the_arguments_default_to_the_process_s(
    installed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["metronome", "--version"])
    assert main() == 0
    assert "metronome" in capsys.readouterr().out


def test_plugins_lists_key_name_owner_summary_and_options(installed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins"]) == 0
    text = capsys.readouterr().out
    assert "policy_loss" not in text  # the hook's name: what a user writes is its key
    for part in (
        "\nloss",
        "plain",
        "one",
        "example-distribution 1.2",
        "a [bold]loss[/bold]",
        "cap=5.0, mode=mask",
    ):
        assert part in text
    assert main(["plugins", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "hook": "policy_loss",
            "selector": "loss",
            "name": "plain",
            "summary": "a [bold]loss[/bold]",
            "options": {"cap": 5.0, "mode": "mask"},
            "plugin": "one",
            "distribution": "example-distribution 1.2",
        }
    ]


def test_a_plugin_that_raises_at_import_is_one_line_and_2(installed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    installed["metronome"].append(Point("bad", RuntimeError("broken")))
    assert main(["plugins"]) == 2
    assert "plug-in 'bad' raised at import: RuntimeError: broken" in error_line(capsys)


def report(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_doctor_reports_versions_hosts_device_and_plugins(installed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    missing = ModuleNotFoundError("No module named 'verl'", name="verl")
    installed["metronome.hosts"] = [Point("example", Host()), Point("other", missing, "metronome-rl")]
    assert main(["doctor", "--json"]) == 0
    found = report(capsys)
    assert found["versions"]["python"].startswith("3.")
    assert found["versions"]["pluggy"]
    assert [(host["name"], host["ready"]) for host in found["hosts"]] == [("example", True), ("other", False)]
    assert 'pip install "metronome-rl[other]"' in found["hosts"][1]["reason"]
    assert found["device"]["kind"] in ("cpu", "cuda", "npu", None)
    assert found["plugins"] == [
        {
            "name": "one",
            "distribution": "example-distribution 1.2",
            "state": "active",
            "offers": [["policy_loss", "plain"]],
        }
    ]
    assert found["problems"] == []
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for part in ("versions", "hosts", "device", "plug-ins", "active", "ready", "metronome-rl[other]"):
        assert part in text


def test_doctor_calls_a_host_ready_only_where_its_package_is(
    installed: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed["metronome.hosts"] = [Point(name, Host()) for name in ("example", "verl", "openrlhf", "areal")]
    monkeypatch.setattr(doctor, "find_spec", lambda name: object() if name == "areal" else None)
    assert main(["doctor", "--json"]) == 0
    found = report(capsys)
    assert {host["name"]: host["ready"] for host in found["hosts"]} == {
        "example": True,
        "verl": False,
        "openrlhf": False,
        "areal": True,
    }
    [reason] = [host["reason"] for host in found["hosts"] if host["name"] == "verl"]
    assert reason == 'not installed: pip install "metronome-rl[verl]"'
    assert found["problems"] == []


def test_doctor_says_that_the_local_host_needs_torch(
    installed: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed["metronome.hosts"] = [Point("local", Host())]
    for there, reason in ((True, None), (False, 'needs torch: pip install "metronome-rl[local]"')):
        monkeypatch.setattr(doctor, "find_spec", lambda name, there=there: object() if there else None)
        assert main(["doctor", "--json"]) == 0
        [host] = report(capsys)["hosts"]
        assert (host["ready"], host["reason"]) == (there, reason)


def test_doctor_exits_2_on_a_plugin_that_raises_and_still_shows_the_others(
    installed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    installed["metronome"].append(Point("bad", RuntimeError("broken")))
    assert main(["doctor", "--json"]) == 2
    found = report(capsys)
    assert [(one["name"], one["state"]) for one in found["plugins"]] == [("bad", "broken"), ("one", "active")]
    assert len(found["problems"]) == 1
    assert "'bad' raised at import: RuntimeError: broken" in found["problems"][0]
    assert main(["doctor"]) == 2


def test_doctor_names_plugins_that_the_environment_disables(
    installed: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed["metronome"].append(Point("bad", RuntimeError("broken")))
    monkeypatch.setenv("METRONOME_DISABLE_PLUGINS", "bad")
    assert main(["doctor", "--json"]) == 0
    found = report(capsys)
    assert found["plugins"][0]["state"] == "disabled by METRONOME_DISABLE_PLUGINS"
    assert found["environment"] == {"METRONOME_DISABLE_PLUGINS": "bad"}


def test_doctor_reports_two_plugins_that_offer_one_name(installed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    installed["metronome"].append(Point("two", plugin()))
    assert main(["doctor", "--json"]) == 2
    (problem,) = report(capsys)["problems"]
    assert (
        "'one' (example-distribution 1.2) at policy_loss and 'two' (example-distribution 1.2) at policy_loss" in problem
    )
    assert "found 'plain'" in problem
    assert "METRONOME_DISABLE_PLUGINS=two" in problem


def test_plugins_lists_two_that_offer_one_name_and_says_so(installed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    installed["metronome"].append(Point("two", plugin()))
    for arguments in (["plugins"], ["plugins", "--json"]):
        assert main(arguments) == 2
        said = capsys.readouterr()
        assert said.out.count("example-distribution 1.2") == 2
        assert said.err.startswith("metronome: error: a name is offered twice")
        assert "found 'plain'" in said.err
        assert said.err.count("\n") == 1


def offering(*offered: Any) -> types.ModuleType:
    module = types.ModuleType("offering")
    module.describe = hookimpl(specname="describe")(lambda: list(offered))  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("offer", "part"),
    [
        (Offer("attention", "plain", "a loss's name at another hook"), "at policy_loss"),
        (Offer("attention", "group_controller", "a key's name"), "a selector's key; found 'group_controller'"),
        (Offer("attention", ["x"], "a name that can't be hashed"), "describe of plug-in 'two'"),  # type: ignore[arg-type]
        (Offer("attention", "x", "no options", None), "describe of plug-in 'two'"),  # type: ignore[arg-type]
    ],
)
def test_doctor_reports_names_and_offers_that_cannot_be_used(
    installed: Any, capsys: pytest.CaptureFixture[str], offer: Offer, part: str
) -> None:
    installed["metronome"].append(Point("two", offering(offer)))
    assert main(["doctor", "--json"]) == 2
    (problem,) = report(capsys)["problems"]
    assert part in problem


def test_plugins_lists_options_that_no_copy_can_be_made_of(installed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    frozen = types.MappingProxyType({"cap": 5.0, "kinds": types.MappingProxyType({})})
    installed["metronome"] = [Point("one", offering(Offer("policy_loss", "plain", "frozen", frozen)))]
    assert main(["plugins"]) == 0
    assert "cap=5.0" in capsys.readouterr().out
    assert main(["plugins", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["options"]["cap"] == 5.0


@pytest.mark.parametrize("wrong", [SystemExit(0), SystemExit("bye")], ids=repr)
@pytest.mark.parametrize("command", ["plugins", "doctor"])
def test_a_plugin_that_exits_at_import_does_not_end_the_command_with_its_code(
    installed: Any, capsys: pytest.CaptureFixture[str], command: str, wrong: SystemExit
) -> None:
    installed["metronome"].append(Point("bad", wrong))
    assert main([command]) == 2
    assert "'bad' raised at import: SystemExit" in " ".join("".join(capsys.readouterr()).split())


def test_doctor_reports_a_host_that_raises_at_import(installed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    installed["metronome.hosts"] = [Point("example", ValueError("broken"))]
    assert main(["doctor", "--json"]) == 2
    assert "the host 'example' raised at import: ValueError: broken" in report(capsys)["problems"][0]


@pytest.mark.parametrize("arguments", [["--version"], ["recipes", "--json"], ["plugins"]], ids=" ".join)
def test_a_reader_that_has_gone_ends_the_command_without_a_traceback(arguments: list[str]) -> None:
    """As ``| head`` does: nobody reads the output any more when it is written."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "metronome.cli", *arguments], stdout=writer, stderr=subprocess.PIPE, timeout=60
        )
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_the_console_script_is_this_main() -> None:
    point = EntryPoint(name="metronome", value="metronome.cli:main", group="console_scripts")
    assert point.load() is cli.main
