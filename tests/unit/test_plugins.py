"""Every fault of a plug-in is one clear error that names the plug-in, its distribution and the remedy."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from metronome import hookimpl, plugins
from metronome.contracts import Offer
from metronome.device import Device
from metronome.errors import ConfigurationError, MetronomeError, PluginError
from metronome.plugins import offered_names, offers, plugin_manager, register, resolve
from metronome.settings import SELECTORS, parse_settings

CPU = Device("cpu", "gloo")


class Source:
    name = "plain"
    max_staleness = 0
    spans_versions = False

    def capacity(self, flow: object) -> int:
        return 0

    release = verdict = period_complete = check = state_dict = load_state_dict = capacity


class Loss:
    name = "plain"
    needs_proximal_forward = keeps_proximal = False

    def __call__(self, batch: object) -> None:
        return None


class Attention:
    name = "plain"
    shares_prompt = False

    def supports(self, need: object) -> None:
        return None

    attend = supports


class Controller:
    name = "plain"

    def size(self) -> int:
        return 4

    largest = prompts = observe = explain = state_dict = load_state_dict = size


HOOKS = ("rollout_source", "policy_loss", "attention", "group_controller")
SUFFIX = {"rollout_source": "", "policy_loss": "-loss", "attention": "-attention", "group_controller": "-controller"}
PLAIN = {
    "rollout_source": Source,
    "policy_loss": Loss,
    "attention": Attention,
    "group_controller": Controller,
}


def make_plugin(
    *names: str, build: Callable[[str, str, Mapping[str, Any]], object] | None = None, describe: Any = None
) -> types.ModuleType:
    """A plug-in that offers each of ``names`` at every hook, with the hook's suffix: plain, plain-loss, ..."""
    module = types.ModuleType("fake")
    build = build or (lambda hook, name, settings: PLAIN[hook]())
    own = {hook: [f"{name}{SUFFIX[hook]}" for name in names] for hook in HOOKS}

    @hookimpl
    def rollout_source(name: str, settings: Mapping[str, Any]) -> object:
        return build("rollout_source", name, settings) if name in own["rollout_source"] else None

    @hookimpl
    def policy_loss(name: str, settings: Mapping[str, Any]) -> object:
        return build("policy_loss", name, settings) if name in own["policy_loss"] else None

    @hookimpl
    def attention(name: str, settings: Mapping[str, Any], device: Device) -> object:
        return build("attention", name, {**settings, "device": device}) if name in own["attention"] else None

    @hookimpl
    def group_controller(name: str, settings: Mapping[str, Any], seed: int) -> object:
        ours = name in own["group_controller"]
        return build("group_controller", name, {**settings, "seed": seed}) if ours else None

    @hookimpl(specname="describe")
    def offer() -> Any:
        every = [Offer(hook, name, "a test's") for hook in HOOKS for name in own[hook]]
        return every if describe is None else describe()

    for function in (rollout_source, policy_loss, attention, group_controller, offer):
        setattr(module, function.__name__, function)
    return module


class Point:
    """An entry point whose ``load`` returns a module or raises."""

    def __init__(self, name: str, loaded: object) -> None:
        self.name, self.value, self.loaded = name, f"{name}_package.plugin", loaded
        self.dist = types.SimpleNamespace(name=f"{name}-distribution", version="1.2")

    def load(self) -> object:
        if isinstance(self.loaded, BaseException):
            raise self.loaded
        return self.loaded


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the given plug-ins the only installed ones."""

    def install(*points: Point) -> None:
        monkeypatch.setattr(plugins, "entry_points", lambda group: list(points))

    for variable in ("DISABLE", "LOAD", "TRACE"):
        monkeypatch.delenv(f"METRONOME_{variable}_PLUGINS", raising=False)
    return install


def settings_for(**selectors: Any) -> Any:
    chosen = {selector: f"plain{SUFFIX[hook]}" for selector, hook in SELECTORS.items()}
    written = {**chosen, **selectors}
    return parse_settings(written, {"other", *(written[selector] for selector in SELECTORS)})


def one_line(error: pytest.ExceptionInfo[MetronomeError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_selection_is_resolved_to_the_four_plain_objects(install: Any) -> None:
    seen = {}
    install(
        Point(
            "one",
            make_plugin("plain", build=lambda hook, _, options: seen.update({hook: options}) or PLAIN[hook]()),
        )
    )
    selection = resolve(settings_for(), CPU, 7, plugin_manager())
    assert isinstance(selection.rollout_source, Source)
    assert isinstance(selection.loss, Loss)
    assert isinstance(selection.attention, Attention)
    assert isinstance(selection.group_controller, Controller)
    assert seen["attention"] == {"device": CPU}
    assert seen["group_controller"] == {"seed": 7}
    assert seen["policy_loss"] == {}


@pytest.mark.parametrize("selector", ["rollout_source", "loss", "attention", "group_controller"])
def test_a_name_that_no_plugin_offers_is_refused_with_the_nearest_name(install: Any, selector: str) -> None:
    install(Point("one", make_plugin("plain")))
    with pytest.raises(PluginError) as error:
        resolve(settings_for(**{selector: f"plian{SUFFIX[SELECTORS[selector]]}"}), CPU, 0, plugin_manager())
    text = one_line(error)
    assert "'plian" in text
    assert f"metronome.{selector}" in text
    assert f"use 'plain{SUFFIX[SELECTORS[selector]]}'" in text


def test_two_plugins_that_offer_one_name_are_refused_with_both_distributions(install: Any) -> None:
    install(Point("one", make_plugin("plain")), Point("two", make_plugin("plain", "other")))
    with pytest.raises(PluginError) as error:
        resolve(settings_for(), CPU, 0, plugin_manager())
    text = one_line(error)
    assert "one-distribution 1.2" in text
    assert "two-distribution 1.2" in text
    assert "METRONOME_DISABLE_PLUGINS=two" in text
    assert resolve(settings_for(), CPU, 0, plugin_manager({"METRONOME_DISABLE_PLUGINS": "two"}))


def test_two_distributions_that_register_one_plugin_name_are_refused(install: Any) -> None:
    twin = Point("one", make_plugin("other"))
    twin.dist.name = "twin-distribution"
    install(Point("one", make_plugin("plain")), twin)
    with pytest.raises(
        PluginError, match=r"one-distribution.*twin-distribution|twin-distribution.*one-distribution"
    ) as error:
        plugin_manager()
    one_line(error)


def test_a_plugin_that_raises_at_import_is_named_with_its_distribution(install: Any) -> None:
    install(Point("good", make_plugin("plain")), Point("bad", ZeroDivisionError("first line\nsecond line")))
    with pytest.raises(PluginError) as error:
        plugin_manager()
    text = one_line(error)
    assert "'bad' raised at import: ZeroDivisionError: first line second line" in text
    assert "bad-distribution 1.2" in text
    assert "METRONOME_DISABLE_PLUGINS=bad" in text
    assert "plain" in offered_names(plugin_manager({"METRONOME_DISABLE_PLUGINS": "bad"}))


@pytest.mark.parametrize("code", [0, 3])
def test_a_plugin_that_exits_at_import_or_in_a_hook_does_not_end_the_command(install: Any, code: int) -> None:
    install(Point("bad", SystemExit(code)))
    with pytest.raises(PluginError, match=rf"'bad' raised at import: SystemExit: {code}"):
        plugin_manager()

    def leave(*_: object) -> object:
        raise SystemExit(code)

    install(Point("bad", make_plugin("plain", build=leave)))
    with pytest.raises(PluginError, match=rf"'bad' raised in rollout_source: SystemExit: {code}"):
        resolve(settings_for(), CPU, 0, plugin_manager())
    install(Point("bad", make_plugin("plain", describe=lambda: leave())))
    with pytest.raises(PluginError, match=rf"'bad' raised in describe: SystemExit: {code}"):
        offers(plugin_manager())
    install(Point("bad", KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        plugin_manager()


def test_a_name_that_is_offered_at_two_hooks_is_refused_where_it_is_selected(install: Any) -> None:
    def describe() -> list[Offer]:
        return [Offer("policy_loss", "both", "a loss"), Offer("attention", "both", "an attention")]

    install(Point("one", make_plugin("plain")), Point("two", make_plugin("both", describe=describe)))
    for selector in ("loss", "attention"):
        with pytest.raises(PluginError) as error:
            resolve(settings_for(**{selector: "both"}), CPU, 0, plugin_manager())
        text = one_line(error)
        assert "'two' (two-distribution 1.2) at policy_loss and 'two' (two-distribution 1.2) at attention" in text
        assert f"in metronome.{selector}; to mend: give one of them another name" in text
        assert "DISABLE" not in text  # both offers are of one plug-in
    assert resolve(settings_for(), CPU, 0, plugin_manager())  # selects neither


def test_a_name_that_is_a_selector_s_key_is_refused_where_it_is_selected(install: Any) -> None:
    def describe() -> list[Offer]:
        return [Offer("policy_loss", "loss", "a loss under a key's name")]

    install(Point("one", make_plugin("plain")), Point("two", make_plugin("x", describe=describe)))
    with pytest.raises(PluginError, match=r"'two' .*a selector's key; found 'loss'; in metronome\.loss"):
        resolve(settings_for(loss="loss"), CPU, 0, plugin_manager())
    assert resolve(settings_for(), CPU, 0, plugin_manager())


def test_a_plugin_that_raises_in_a_hook_is_named(install: Any) -> None:
    def build(hook: str, _: str, __: Mapping[str, Any]) -> object:
        if hook == "policy_loss":
            raise KeyError("lost")
        return PLAIN[hook]()

    install(Point("bad", make_plugin("plain", build=build)))
    with pytest.raises(PluginError) as error:
        resolve(settings_for(), CPU, 0, plugin_manager())
    text = one_line(error)
    assert "'bad' raised in policy_loss: KeyError: 'lost'" in text
    assert isinstance(error.value.__cause__, KeyError)


def test_a_plugin_that_answers_for_every_name_displaces_nobody(install: Any) -> None:
    greedy = types.ModuleType("greedy")

    @hookimpl
    def policy_loss(name: str, settings: Mapping[str, Any]) -> object:
        raise RuntimeError(f"asked for {name}")

    greedy.policy_loss = policy_loss  # type: ignore[attr-defined]
    mine = Loss()
    build = {**PLAIN, "policy_loss": lambda: mine}
    owner = make_plugin("plain", build=lambda hook, _, __: build[hook]())
    for points in ([Point("a", greedy), Point("b", owner)], [Point("b", owner), Point("z", greedy)]):
        install(*points)
        assert resolve(settings_for(), CPU, 0, plugin_manager()).loss is mine


def test_a_plugin_s_own_configuration_error_goes_through_unchanged(install: Any) -> None:
    wrong = ConfigurationError("cap must be positive", found=-1, where="metronome.plain.cap", remedy="cap: 5.0")

    def build(hook: str, _: str, __: Mapping[str, Any]) -> object:
        raise wrong

    install(Point("one", make_plugin("plain", build=build)))
    with pytest.raises(ConfigurationError) as error:
        resolve(settings_for(), CPU, 0, plugin_manager())
    assert error.value is wrong


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("wrong", [None, "a string", object()], ids=["None", "str", "object"])
def test_a_hook_that_returns_the_wrong_type_is_refused_with_the_contract(
    install: Any, hook: str, wrong: object
) -> None:
    def build(called: str, _: str, __: Mapping[str, Any]) -> object:
        return wrong if called == hook else PLAIN[called]()

    install(Point("bad", make_plugin("plain", build=build)))
    with pytest.raises(PluginError) as error:
        resolve(settings_for(), CPU, 0, plugin_manager())
    text = one_line(error)
    assert f"found '{type(wrong).__name__}'" in text
    assert plugins._CONTRACTS[hook].__name__ in text


@pytest.mark.parametrize("hook", HOOKS)
def test_a_class_instead_of_an_object_is_refused_with_a_hint(install: Any, hook: str) -> None:
    def build(called: str, _: str, __: Mapping[str, Any]) -> object:
        return PLAIN[called] if called == hook else PLAIN[called]()

    install(Point("bad", make_plugin("plain", build=build)))
    with pytest.raises(PluginError) as error:
        resolve(settings_for(), CPU, 0, plugin_manager())
    text = one_line(error)
    assert f"'bad' returned no {plugins._CONTRACTS[hook].__name__}" in text
    assert f"have you forgotten the () of {PLAIN[hook].__name__}?" in text


def test_options_for_a_hook_that_takes_no_settings_are_refused(install: Any) -> None:
    module = make_plugin("plain")

    @hookimpl
    def policy_loss(name: str) -> object:
        return Loss() if name == "plain-loss" else None

    module.policy_loss = policy_loss  # type: ignore[attr-defined]
    install(Point("bad", module))
    with pytest.raises(PluginError) as error:
        resolve(settings_for(**{"plain-loss": {"cap": 1.0}}), CPU, 0, plugin_manager())
    text = one_line(error)
    assert "'bad' takes no settings in policy_loss" in text
    assert "in metronome.plain-loss" in text
    assert resolve(settings_for(), CPU, 0, plugin_manager())  # without options there is nothing to lose


def test_a_plugin_that_implements_an_unknown_hook_is_refused(install: Any) -> None:
    module = make_plugin("plain")

    @hookimpl
    def reward_shaper(name: str) -> None:
        return None

    module.reward_shaper = reward_shaper  # type: ignore[attr-defined]
    install(Point("bad", module))
    with pytest.raises(PluginError) as error:
        plugin_manager()
    assert "reward_shaper" in one_line(error)


def test_a_hook_with_another_argument_is_refused(install: Any) -> None:
    module = types.ModuleType("fake")

    @hookimpl
    def policy_loss(name: str, options: Mapping[str, Any]) -> None:
        return None

    module.policy_loss = policy_loss  # type: ignore[attr-defined]
    install(Point("bad", module))
    with pytest.raises(PluginError) as error:
        plugin_manager()
    assert "options" in one_line(error)


@pytest.mark.parametrize(
    "rubbish",
    [
        5,
        "text",
        [1],
        {"a": 1},
        [Offer("reward", "plain", "no such hook")],  # type: ignore[arg-type]
        [Offer("attention", 7, "a name that is no string")],  # type: ignore[arg-type]
        [Offer("attention", ["plain"], "a name that can't be hashed")],  # type: ignore[arg-type]
        [Offer("attention", "", "an empty name")],
        [Offer("attention", "plain", None)],  # type: ignore[arg-type]
        [Offer("attention", "plain", "options in a list", ["cap"])],  # type: ignore[arg-type]
        [Offer("attention", "plain", "no options", None)],  # type: ignore[arg-type]
        [Offer("attention", "plain", "an option that is no string", {1: 2})],  # type: ignore[dict-item]
    ],
    ids=lambda rubbish: repr(rubbish)[:60],
)
def test_a_describe_that_returns_rubbish_is_refused(install: Any, rubbish: object) -> None:
    install(Point("bad", make_plugin("plain", describe=lambda: rubbish)))
    with pytest.raises(PluginError) as error:
        offers(plugin_manager())
    assert "'bad'" in one_line(error)


def test_a_describe_that_raises_is_named(install: Any) -> None:
    install(Point("bad", make_plugin("plain", describe=lambda: 1 / 0)))
    with pytest.raises(PluginError, match="'bad' raised in describe: ZeroDivisionError"):
        offers(plugin_manager())


@pytest.mark.parametrize("nothing", [None, []], ids=["None", "empty"])
def test_a_describe_may_offer_nothing(install: Any, nothing: object) -> None:
    install(Point("one", make_plugin(describe=lambda: nothing)))
    assert offers(plugin_manager()) == []


def test_the_environment_disables_plugins(install: Any) -> None:
    install(Point("one", make_plugin("first")), Point("two", make_plugin("second")))
    assert offered_names(plugin_manager({})) >= {"first", "second"}
    assert {one.plugin for one in offers(plugin_manager({"METRONOME_DISABLE_PLUGINS": "two"}))} == {"one"}
    assert offered_names(plugin_manager({"METRONOME_DISABLE_PLUGINS": " one , two,"})) == set()


def test_the_environment_loads_only_the_named_plugins(install: Any) -> None:
    install(Point("one", make_plugin("first")), Point("bad", RuntimeError("never loaded")))
    assert {one.plugin for one in offers(plugin_manager({"METRONOME_LOAD_PLUGINS": "one"}))} == {"one"}


@pytest.mark.parametrize("variable", ["METRONOME_DISABLE_PLUGINS", "METRONOME_LOAD_PLUGINS"])
def test_an_unknown_plugin_in_the_environment_is_refused(install: Any, variable: str) -> None:
    install(Point("periodic", make_plugin("plain")))
    with pytest.raises(PluginError, match=rf"'perodic'; in {variable}; to mend: use 'periodic'"):
        plugin_manager({variable: "perodic"})


def test_the_environment_traces_hook_calls(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install(Point("one", make_plugin("plain")))
    resolve(settings_for(), CPU, 3, plugin_manager({}))
    assert "group_controller" not in "".join(capsys.readouterr())
    resolve(settings_for(), CPU, 3, plugin_manager({"METRONOME_TRACE_PLUGINS": "1"}))
    traced = "".join(capsys.readouterr())
    assert "group_controller(name='plain-controller', settings={}, seed=3)" in traced
    assert "metronome: group_controller ->" in traced
    assert "describe" not in traced
    for off in ("0", "false", "yes", ""):
        resolve(settings_for(), CPU, 3, plugin_manager({"METRONOME_TRACE_PLUGINS": off}))
        assert "group_controller" not in "".join(capsys.readouterr())


def test_a_plugin_registered_by_hand_carries_its_distribution(install: Any) -> None:
    install()
    manager = plugin_manager()
    register(manager, "mine", make_plugin("plain"), "my distribution 3")
    assert {(one.plugin, one.distribution) for one in offers(manager)} == {("mine", "my distribution 3")}


def test_a_package_that_a_plugin_lacks_is_what_to_install(install: Callable[..., None]) -> None:
    missing = ModuleNotFoundError("No module named 'absent_package'", name="absent_package.part")
    install(Point("one", make_plugin("plain", build=lambda *_: (_ for _ in ()).throw(missing))))
    with pytest.raises(PluginError, match="raised in") as error:
        resolve(settings_for(), CPU, 0, plugin_manager({}))
    assert "No module named 'absent_package'" in one_line(error)
    assert error.value.remedy == "install absent_package"
    install(Point("one", missing))
    with pytest.raises(PluginError, match="raised at import") as error:
        plugin_manager({})
    assert error.value.remedy == "install absent_package, or METRONOME_DISABLE_PLUGINS=one"


def test_a_module_that_an_installed_package_lacks_is_the_plugin_s_fault(install: Callable[..., None]) -> None:
    missing = ModuleNotFoundError("No module named 'metronome.absent'", name="metronome.absent")
    install(Point("one", make_plugin("plain", build=lambda *_: (_ for _ in ()).throw(missing))))
    with pytest.raises(PluginError) as error:
        resolve(settings_for(), CPU, 0, plugin_manager({}))
    assert error.value.remedy == "mend the plug-in, or METRONOME_DISABLE_PLUGINS=one"
