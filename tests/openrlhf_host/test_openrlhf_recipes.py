"""Every recipe with every overlay is one that OpenRLHF's own parser and our launcher accept; bad ones say why."""

import os
import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need openrlhf (requirements/openrlhf.txt)")

from metronome import host_process
from metronome.errors import ConfigurationError
from metronome.overlays import Machine, layered, parse_layered, typed_settings
from metronome.recipes import override, parse_yaml
from metronome_openrlhf import run as host
from metronome_openrlhf.recipe import Recipe
from metronome_openrlhf.smoke import FILES, keys

FOLDER = Path(__file__).parents[2] / "recipes" / "openrlhf"
RECIPES = sorted(FOLDER.glob("*.yaml"))


def read(name, *overrides):
    path = FOLDER / f"{name}.yaml"
    recipe = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    for one in overrides:
        recipe = override(recipe, one)
    return recipe, str(path)


def composed(name, *overrides, assets=None):
    recipe, where = read(name, *overrides)
    parsed = parse_layered(Recipe, recipe, where, smoke=assets is not None)
    return layered(parsed, typed_settings(recipe, where), Machine(keys, assets) if assets else None)


def variants():
    for path in RECIPES:
        overlays = parse_yaml(path.read_text(encoding="utf-8"), str(path))["overlays"]
        for name, smoke in product(["", *overlays], [False, True]):
            yield pytest.param(path.stem, name, smoke, id=f"{path.stem}-{name or 'plain'}{'-smoke' if smoke else ''}")


DEFAULTS = {"output": None, "resume": None, "smoke": False}


def run(name, *overrides, **others):
    recipe, where = read(name, *overrides)
    return host.run(recipe, where=where, **(DEFAULTS | {"dry_run": False} | others))


def dry(name, *overrides, **others):
    return run(name, *overrides, dry_run=True, **others)


@pytest.fixture
def started(monkeypatch, tmp_path_factory):
    """What would have been started, on a machine that has every file that a recipe names."""
    calls = []
    home = tmp_path_factory.mktemp("home")
    for path in RECIPES:
        for name in re.findall(r"~/([\w./-]+\.(?:py|jsonl))", path.read_text(encoding="utf-8")):
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(host, "start", lambda command, environment, *_: calls.append((command, dict(environment))) or 3)
    return calls


def test_every_row_has_its_recipe_and_its_variants():
    names = {path.stem for path in RECIPES}
    assert names == {
        "sagc_baselines",
        "sagc",
        "periodic_qwen3_8b",
        "a3po_setup1",
        "a3po_setup2",
        "long_prompt",
        "all_four",
    }
    for name in names:
        recipe, where = read(name)
        parsed = parse_layered(Recipe, recipe, where, smoke=False)
        assert {"gpu", "npu"} <= parsed.overlays.keys()
        assert any(one.startswith("g") and one[1:].isdigit() for one in parsed.overlays)
        assert "arXiv" in parsed.paper.source
        assert parsed.paper.ours
        assert "no code for NPUs" in parsed.overlays["npu"].note


@pytest.mark.parametrize(("name", "overlay", "smoke"), list(variants()))
def test_openrlhf_s_parser_and_our_launcher_accept_every_variant(name, overlay, smoke, capsys):
    chosen = [f"overlay={overlay}"] if overlay else []
    assert dry(name, *chosen, smoke=smoke) == 0
    assert "Nothing was started." in capsys.readouterr().out
    args, _ = composed(name, *chosen, assets=Path("/tiny") if smoke else None)
    assert "{assets}" not in str(args)
    assert "~" not in str(args)  # OpenRLHF doesn't expand it
    if smoke:
        assert args["actor.model_name_or_path"] == "/tiny/model"
        assert not args["ds.packing_samples"]  # there is no flash attention


@pytest.mark.parametrize("name", ["sagc_baselines", "a3po_setup1", "a3po_setup2", "long_prompt", "periodic_qwen3_8b"])
def test_a_batch_is_a_whole_number_of_optimiser_steps(name):
    """What OpenRLHF leaves over stays in the gradient of the next batch."""
    for one in ["", *parse_yaml((FOLDER / f"{name}.yaml").read_text(), name)["overlays"]]:
        args, _ = composed(name, *([f"overlay={one}"] if one else []))
        size = args["rollout.n_samples_per_prompt"]
        assert args["rollout.batch_size"] * size % args["train.batch_size"] == 0
        ranks = args["actor.num_nodes"] * args["actor.num_gpus_per_node"]
        assert args["train.batch_size"] % (args["train.micro_batch_size"] * ranks) == 0


def test_openrlhf_s_baselines_have_nothing_of_ours():
    for overlay in ("g4", "g8", "g16", "grpo", "qwen2_5_3b"):
        assert composed("sagc_baselines", f"overlay={overlay}")[1] == {}
    # and SAGC's recipe differs from them by our block alone
    assert composed("sagc")[0] == composed("sagc_baselines")[0]


def test_a_dry_run_prints_the_command_and_starts_nothing(capsys, started, tmp_path):
    assert dry("all_four", smoke=True, output=str(tmp_path / "out")) == 0
    said = capsys.readouterr().out
    for part in (
        "python -m metronome_openrlhf \\\n",
        "--metronome.cpu \\\n",
        "--metronome.loss=a3po",
        "'--metronome.sagc.sizes=[2,4]'",
        f"--ckpt.path {tmp_path / 'out' / 'checkpoints'} \\\n",
        f"data: python -m metronome_openrlhf.cpu.assets {tmp_path / 'out' / 'smoke'}",
        "metronome: --ds.grad_accum_dtype fp32",  # what the launcher will set besides
        "Nothing was started.",
    ):
        assert part in said
    assert "git clone" not in said  # the recipe's own data aren't needed
    assert not started
    assert not (tmp_path / "out").exists()


def test_the_printed_command_is_one_that_a_shell_reads_back(capsys, started):
    import shlex

    dry("a3po_setup1")
    printed = capsys.readouterr().out.partition("python -m metronome_openrlhf")[2].partition("Nothing was")[0]
    run("a3po_setup1")
    assert shlex.split(printed.replace("\\\n", " ")) == started[0][0][3:]


def test_a_path_that_isn_t_here_is_a_note_of_a_dry_run_and_stops_a_run(started, capsys, monkeypatch, tmp_path):
    dry("sagc")
    assert "isn't on this machine" not in capsys.readouterr().out
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    missing = tmp_path / "OpenRLHF/examples/python/math_reward_func.py"
    assert dry("sagc") == 0
    assert f"metronome: --reward.remote_url {missing} isn't on this machine" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match=rf"found '{missing}'; in .*sagc\.yaml: args\.reward\.remote_url"):
        run("sagc")
    assert not started
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")  # its machines may have it
    assert run("sagc") == 3
    # A smoke run makes its own, unless the user names them
    dry("sagc", smoke=True)
    assert "isn't on this machine" not in capsys.readouterr().out
    dry("sagc", f"assets={tmp_path / 'none'}", smoke=True)
    assert f"{tmp_path / 'none' / 'model'} isn't on this machine" in capsys.readouterr().out


def test_the_docs_and_a_dry_run_name_every_overlay(capsys):
    table = (FOLDER.parents[1] / "docs" / "openrlhf.md").read_text(encoding="utf-8").partition("| recipe | ")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| ([^|]*) \|$", table, re.MULTILINE))
    for path in RECIPES:
        overlays = list(parse_yaml(path.read_text(encoding="utf-8"), str(path))["overlays"])
        assert rows[path.stem] == ", ".join(f"`{one}`" for one in overlays), path.stem
        dry(path.stem)
        assert f"overlays: {', '.join(overlays)}  (overlay=NAME" in capsys.readouterr().out


def test_an_overlay_says_what_lacks(capsys):
    dry("all_four", "overlay=npu")
    assert "metronome: npu: OpenRLHF 0.11.2 has no code for NPUs" in capsys.readouterr().out
    dry("all_four", "overlay=gpu")
    assert "NPU" not in capsys.readouterr().out


def test_without_openrlhf_a_dry_run_says_that_nothing_was_validated_and_a_run_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(host, "openrlhf_folder", lambda: None)
    assert dry("sagc") == 0
    assert "not validated" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match=r"metronome-rl\[openrlhf\]"):
        run("sagc")


def test_a_dry_run_imports_neither_ray_nor_torch_nor_openrlhf():
    """It answers in a second, and on a machine without flash-attn, which OpenRLHF imports."""
    script = (
        "import sys\n"
        "from metronome.recipes import load_recipe\n"
        "from metronome_openrlhf.command import flags_of, openrlhf_folder, validate\n"
        "recipe = load_recipe(sys.argv[1])\n"
        "validate(flags_of(recipe['args'], {}), openrlhf_folder(), 'recipe')\n"
        "print(sorted({'ray', 'torch', 'openrlhf', 'vllm', 'flash_attn'} & {*sys.modules}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(FOLDER / "sagc_baselines.yaml")], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "[]", done.stderr


def test_the_command_line_has_the_last_word_over_overlays():
    args, block = composed("sagc", "overlay=g8", "metronome.fixed.size=6", "args.train.batch_size=192")
    assert block == {"group_controller": "fixed", "fixed.size": 6}
    assert args["train.batch_size"] == 192
    args, _ = composed("long_prompt", "overlay=g16", "args.rollout.n_samples_per_prompt=8")  # the recipe's own value
    assert args["rollout.n_samples_per_prompt"] == 8
    args, _ = composed("sagc", "args.train.micro_batch_size=2", assets=Path("/tiny"))
    assert args["train.micro_batch_size"] == 2


def test_a_run_starts_our_launcher_and_returns_its_exit_code(started):
    assert run("a3po_setup1") == 3
    [(command, environment)] = started
    assert command[:3] == [sys.executable, "-m", "metronome_openrlhf"]
    assert command[command.index("--actor.eps_clip") + 1] == "0.4"
    assert "--metronome.cpu" not in command
    assert environment == dict(os.environ)


def test_a_smoke_run_makes_its_model_and_data_and_writes_beside_them(started, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # Ray would refuse to pretend more
    assert run("all_four", "overlay=bounded", smoke=True) == 3
    [folder] = tmp_path.glob("metronome-smoke-*")
    assert {one.name for one in folder.iterdir()} == {*FILES}
    assert str(folder) in capsys.readouterr().out
    [(command, environment)] = started
    assert command[command.index("--actor.model_name_or_path") + 1] == str(folder / "model")
    assert command[command.index("--ckpt.path") + 1] == str(folder / "checkpoints")
    assert command[command.index("--ckpt.output_dir") + 1] == str(folder / "trained")
    assert {"--metronome.cpu", "--metronome.rollout_source=bounded"} <= {*command}
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in environment


def test_a_smoke_run_ends_with_what_was_seen_and_where_things_are(monkeypatch, tmp_path, capsys):
    lines = [
        "(Trainer pid=1) INFO Global step 1: {'metronome/periodic/parts': 1, 'metronome/loss/staleness_max': 0.0,"
        " 'metronome/loss/calls': 2.0,"
        " 'metronome/loss/off_behavior': 0.0, 'metronome/attention/tokens_fed': 30.0,"
        " 'metronome/attention/tokens_separate': 40.0, 'metronome/group_controller/size': 2}",
        "nothing of ours",
        "(Trainer pid=1) INFO Global step 2: {'metronome/periodic/parts': 3, 'metronome/loss/staleness_max': 2.0,"
        " 'metronome/loss/off_behavior': 0.25, 'metronome/attention/tokens_fed': 3e1,"
        " 'metronome/attention/tokens_separate': 40.0, 'metronome/group_controller/size': 4}",
    ]

    def start(command, environment, heard):
        for line in lines:
            heard(line)
        (tmp_path / "trained").mkdir()
        (tmp_path / "checkpoints" / "_actor").mkdir(parents=True)
        (tmp_path / "checkpoints" / "_actor" / "latest").touch()
        return code

    monkeypatch.setattr(host, "start", start)
    code = 0
    assert run("all_four", smoke=True, output=str(tmp_path)) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        "metronome: smoke run: 2 steps; batches trained in 1 to 3 parts; loss a3po, 2 calls; samples up to 2 versions"
        " old; A-3PO's proximal policy wasn't the engines' for up to 25% of the tokens; 60 tokens fed for 80; G 2, 4."
        f" model in {tmp_path / 'trained'}, checkpoints in {tmp_path / 'checkpoints'} (--resume {tmp_path} goes on from"
        f" the last), tiny model and data in {tmp_path / 'smoke'}"
    )
    # One that failed says so, and not that it left a model.
    (tmp_path / "trained").rmdir()
    (tmp_path / "checkpoints" / "_actor" / "latest").unlink()
    (tmp_path / "checkpoints" / "_actor").rmdir()
    (tmp_path / "checkpoints").rmdir()
    code, lines = 1, []
    assert run("all_four", smoke=True, output=str(tmp_path)) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("metronome: smoke run: ended with exit code 1 after 0 steps. checkpoints in")


def test_samples_of_the_a3po_recipes_may_be_two_versions_old(capsys):
    """OpenRLHF's queue has one place by default, and A-3PO is plain PPO up to one version."""
    for name, overlay in (("a3po_setup1", []), ("a3po_setup2", []), ("all_four", ["overlay=bounded"])):
        for smoke in (False, True):
            dry(name, *overlay, smoke=smoke)
            assert "metronome: --train.async_queue_size 2 " in capsys.readouterr().out


def test_a_smoke_run_takes_the_user_s_model_and_data_and_names_a_part_that_lacks(started, tmp_path):
    for name in FILES:
        (tmp_path / name).touch()
    assert run("sagc", f"assets={tmp_path}", smoke=True, output=str(tmp_path / "out")) == 3
    assert str(tmp_path / "prompts.jsonl") in started[0][0]
    assert not (tmp_path / "out").exists()  # nothing was made
    (tmp_path / "reward.py").unlink()
    with pytest.raises(ConfigurationError, match=r"no reward\.py"):
        run("sagc", f"assets={tmp_path}", smoke=True)
    with pytest.raises(ConfigurationError, match="--smoke"):
        run("sagc", f"assets={tmp_path}")
    assert len(started) == 1


def test_a_folder_that_can_t_be_written_is_one_clear_error(started, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"can't be written.*--output FOLDER"):
        run("sagc", smoke=True, output=str(tmp_path / "file" / "below"))
    assert not started


def test_a_run_goes_on_in_the_folder_that_it_wrote(started, tmp_path):
    assert run("sagc", output=str(tmp_path)) == 3
    written = started[0][0]
    assert written[written.index("--ckpt.path") + 1] == str(tmp_path / "checkpoints")
    assert "--ckpt.load_enable" not in written
    with pytest.raises(ConfigurationError, match="checkpoints/_actor/latest"):
        run("sagc", resume=str(tmp_path))
    actor = tmp_path / "checkpoints" / "_actor"
    actor.mkdir(parents=True)
    (actor / "latest").write_text("global_step2")
    assert run("sagc", resume=str(tmp_path)) == 3
    resumed = started[1][0]
    assert "--ckpt.load_enable" in resumed
    assert [one for one in resumed if one != "--ckpt.load_enable"] == written
    with pytest.raises(ConfigurationError, match="leave --output out"):
        run("sagc", output="a", resume="b")
    assert len(started) == 2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["overlay=nppu"], "npu"),
        (["overlay=smoke"], "--smoke"),
        (["argz.a=1"], "did you mean 'args'|args"),
        (["paper.rows=1"], "row"),
        (["args.train.batch_sise=4"], r"--train\.batch_sise 4.*--train\.batch_size"),
        (["args.algo.advantage.estimator=grpo"], "invalid choice: 'grpo'.*group_norm"),
        (["args.ds={}"], r"no mapping.*args\.ds"),
        (["metronome.group_controler=fixed"], "group_controller"),
        (["overlay=g8", "metronome.sagc.tau=3.0"], "isn't selected"),
        (["metronome.rollout_source=periodic"], r"--train\.colocate_all"),
        (["args.vllm.num_engines=4"], r"must be as many.*vllm\.num_engines: 8"),
        (["args.algo.kl.init_coef=0.1", "args.ref.num_gpus_per_node=4"], r"ref\.num_gpus_per_node: 8"),
        (["train.batch_size=4"], r"this key lies in args.*to mend: args\.train\.batch_size=4"),
        (["data.max_len=64"], r"to mend: args\.data\.max_len=64"),
        (["args.vllm.num_engines=null"], "TypeError"),  # OpenRLHF's main compares it unseen
    ],
)
def test_a_bad_recipe_is_refused_in_one_line_that_names_the_key(overrides, words):
    with pytest.raises(ConfigurationError, match=words) as refused:
        dry("sagc", *overrides)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


def test_compare_is_refused_with_the_reason():
    recipe, where = read("sagc")
    with pytest.raises(ConfigurationError, match=r"once per value of metronome\.loss"):
        host.compare(recipe, ("metronome.loss", ["ppo", "a3po"]), where=where, output=None)


def test_a_started_process_has_its_environment_and_returns_its_exit_code():
    command = [sys.executable, "-c", "import os, sys; sys.exit(int(os.environ['CODE']))"]
    assert host_process.start(command, {"CODE": "7"}) == 7


def test_a_started_process_s_lines_are_heard_and_printed(capsys):
    heard = []
    command = [sys.executable, "-c", r"import sys; sys.stdout.buffer.write(b'one\n\xff\ntwo'); sys.exit(7)"]
    assert host_process.start(command, dict(os.environ), heard.append) == 7
    assert heard == ["one\n", "\ufffd\n", "two"]
    assert capsys.readouterr().out == "one\n\ufffd\ntwo"
