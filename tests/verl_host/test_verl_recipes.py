"""Every recipe with every overlay is one that verl's own configuration and our trainer accept; bad ones say why."""

from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")

from metronome.errors import ConfigurationError
from metronome.recipes import override, parse_yaml
from metronome_verl import run as host
from metronome_verl.command import overrides_of, spelt, validate, verl_config_folder
from metronome_verl.recipe import parse_recipe, settings_of, typed_settings

FOLDER = Path(__file__).parents[2] / "recipes" / "verl"
RECIPES = sorted(FOLDER.glob("*.yaml"))


def read(name, *overrides):
    path = FOLDER / f"{name}.yaml"
    recipe = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    for one in overrides:
        recipe = override(recipe, one)
    return recipe, str(path)


def composed(name, *overrides):
    recipe, where = read(name, *overrides)
    parsed = parse_recipe(recipe, where)
    return settings_of(parsed, typed_settings(recipe, where))


def variants():
    for path in RECIPES:
        overlays = parse_yaml(path.read_text(encoding="utf-8"), str(path))["overlays"]
        for name, smoke in product(["", *overlays], [False, True]):
            yield pytest.param(
                path.stem, [part for part in (name, "smoke" if smoke else "") if part], id=f"{path.stem}-{name}-{smoke}"
            )


def dry(name, *overrides, **others):
    recipe, where = read(name, *overrides)
    return host.run(recipe, where=where, dry_run=True, **({"output": None, "resume": None} | others))


def test_every_row_has_its_recipe_and_its_variants():
    names = {path.stem for path in RECIPES}
    assert names == {
        "periodic_qwen3_8b",
        "periodic_r1_distill_32b",
        "a3po_setup1",
        "a3po_setup2",
        "sagc",
        "long_prompt",
        "all_four",
    }
    for name in names:
        recipe, where = read(name)
        parsed = parse_recipe(recipe, where)
        assert {"gpu", "npu"} <= parsed.overlays.keys()
        assert any(one.startswith("g") and one[1:].isdigit() for one in parsed.overlays)
        assert "arXiv" in parsed.paper.source
        assert parsed.paper.ours


@pytest.mark.parametrize(("name", "overlays"), list(variants()))
def test_verl_s_configuration_and_our_trainer_accept_every_variant(name, overlays):
    args, block = composed(name, f"overlay=[{','.join(overlays)}]", "assets=tiny")
    folder = verl_config_folder()
    assert folder is not None
    validate(overrides_of(args, block), folder, name)
    if "smoke" in overlays:
        assert args["trainer.device"] == "cpu"
        assert args["actor_rollout_ref.model.path"] == str(Path("tiny").absolute() / "model")
    assert "~" not in str(args)  # verl doesn't expand it


def test_a_dry_run_prints_the_command_and_starts_nothing(capsys, monkeypatch):
    monkeypatch.setattr(host, "_start", lambda *_: pytest.fail("started"))
    assert dry("all_four", "overlay=smoke", "assets=tiny", output="out") == 0
    said = capsys.readouterr().out
    assert "VERL_PLATFORM=cpu python -m verl.trainer.main_ppo" in said
    for part in ("trainer.v1.trainer_mode=metronome", "+metronome.loss=a3po", "+metronome.sagc.sizes=[2,4]"):
        assert part in said
    assert f"trainer.default_local_dir={Path('out').absolute()}" in said
    assert "hybrid_engine=False" in said  # what our trainer will set besides
    assert "Nothing was started." in said


def test_without_verl_a_dry_run_says_that_nothing_was_validated_and_a_run_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(host, "verl_config_folder", lambda: None)
    assert dry("sagc") == 0
    assert "not validated" in capsys.readouterr().out
    recipe, where = read("sagc")
    with pytest.raises(ConfigurationError, match=r"metronome-rl\[verl\]"):
        host.run(recipe, where=where, output=None, resume=None, dry_run=False)


def test_the_command_line_has_the_last_word_over_overlays():
    args, block = composed(
        "sagc", "overlay=g8", "metronome.fixed.size=6", "args.data.train_batch_size=24", "args.trainer.device=cpu"
    )
    assert block == {"group_controller": "fixed", "fixed.size": 6}
    assert args["data.train_batch_size"] == 24
    args, _ = composed("long_prompt", "overlay=g16", "args.actor_rollout_ref.rollout.n=8")  # the recipe's own value
    assert args["actor_rollout_ref.rollout.n"] == 8


def test_a_run_starts_verl_s_main_and_returns_its_exit_code(tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(host, "_start", lambda command, environment: started.append((command, environment)) or 3)
    for name in ("model", "train.parquet", "validation.parquet", "reward.py"):
        (tmp_path / name).touch()
    recipe, where = read("a3po_setup1", "overlay=smoke", f"assets={tmp_path}")
    assert host.run(recipe, where=where, output=None, resume=None, dry_run=False) == 3
    [(command, environment)] = started
    assert command[1:3] == ["-m", "verl.trainer.main_ppo"]
    assert "+metronome.a3po.clip_low=0.4" in command
    assert environment["VERL_PLATFORM"] == "cpu"
    (tmp_path / "reward.py").unlink()
    with pytest.raises(ConfigurationError, match=r"reward\.py"):
        host.run(recipe, where=where, output=None, resume=None, dry_run=False)
    assert len(started) == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["overlay=nppu"], "npu"),
        (["overlay=smoke"], "assets=FOLDER"),
        (["argz.a=1"], "did you mean 'args'|args"),
        (["paper.rows=1"], "row"),
        (["overlays.smoke={}"], "CPU room"),
        (["args.data.train_batch_sise=4"], "train_batch_sise"),
        (["args.model_engine=fspd"], "fspd"),
        (["metronome.group_controler=fixed"], "group_controller"),
        (["overlay=g8", "metronome.sagc.tau=3.0"], "isn't selected"),
        (["metronome.rollout_source=periodic"], "rollout.nnodes"),
    ],
)
def test_a_bad_recipe_is_refused_in_one_line_that_names_the_key(overrides, words):
    with pytest.raises(ConfigurationError, match=words) as refused:
        dry("sagc", *overrides)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


def test_batches_that_verl_s_separate_trainer_would_stop_at_are_refused_before():
    with pytest.raises(ConfigurationError, match="ppo_mini_batch_size=128"):
        dry("a3po_setup1", "args.data.train_batch_size=128")


def test_folders_that_contradict_and_checkpoints_that_are_not_there_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(host, "_start", lambda *_: pytest.fail("started"))
    with pytest.raises(ConfigurationError, match="leave --output out"):
        dry("sagc", output="a", resume="b")
    recipe, where = read("sagc")
    with pytest.raises(ConfigurationError, match="global_step_N"):
        host.run(recipe, where=where, output=None, resume=str(tmp_path), dry_run=False)


def test_compare_is_refused_with_the_reason():
    recipe, where = read("sagc")
    with pytest.raises(ConfigurationError, match=r"once per value of metronome\.loss"):
        host.compare(recipe, ("metronome.loss", ["ppo", "a3po"]), where=where, output=None)


def test_values_keep_their_type_on_verl_s_command_line():
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create()
    for value in (None, True, 3, 1.7e-5, "true", "~/a b/it's", "1e-6", "", "a\\", ["a,b", 2, "x"], {"k": "null"}, []):
        assert parser.parse_override(f"key={spelt(value)}").value() == value, value
