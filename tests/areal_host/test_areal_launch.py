"""``python -m metronome_areal`` with a user's script: what stands in AReaL's places, what is refused, and real runs."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("areal", reason="the AReaL adapter's tests need AReaL (requirements/areal.txt)")

import areal_room as room
import yaml
from areal.trainer import rl_trainer
from areal.trainer.ppo.actor import PPOActor

from metronome.errors import ConfigurationError
from metronome_areal import host, launch
from metronome_areal.cpu import assets
from metronome_areal.keys import keys_at, overrides
from metronome_areal.paths import check_paths
from metronome_patches import ledger

# A user's script: AReaL's names, a class of its own, a reward beside it.
SCRIPT = """
import json, sys
from dataclasses import dataclass

from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.utils.hf_utils import load_hf_tokenizer


@dataclass
class MyConfig(GRPOConfig):
    prompts: str = ""


def reward(prompt, completions, prompt_ids, completion_ids, answer=None, **others):
    return sum(one.isdigit() for one in completions) / max(1, len(completions))


def main(arguments):
    config, _ = load_expr_config(arguments, MyConfig)
    assert isinstance(config, MyConfig)
    rows = [json.loads(line) for line in open(config.prompts)]
    named = {"gconfig": config.gconfig, "tokenizer": config.tokenizer_path}
    with PPOTrainer(config, train_dataset=rows) as trainer:
        trainer.train(workflow="areal.workflow.rlvr.RLVRWorkflow", workflow_kwargs={"reward_fn": reward, **named})
        found = f"{type(trainer).__module__} to version {trainer.actor.get_version()}"
        print(f"script: trained by {found}\\n", end="", flush=True)  # in one piece, beside another rank's


if __name__ == "__main__":
    main(sys.argv[1:])
"""

READS = """
import sys
from areal.api.cli_args import GRPOConfig, SFTConfig, load_expr_config
import areal, areal.trainer, areal.trainer.rl_trainer

config, _ = load_expr_config(sys.argv[1:], SFTConfig if "sft" in sys.argv[0] else GRPOConfig)
trainers = {areal.PPOTrainer, areal.trainer.PPOTrainer, areal.trainer.rl_trainer.PPOTrainer}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A script, a configuration without and one with our block."""
    found = tmp_path_factory.mktemp("launch")
    assets.make(found)
    settings = room.settings(found)
    del settings["metronome"]
    (found / "plain.yaml").write_text(yaml.safe_dump(settings))
    (found / "block.yaml").write_text(yaml.safe_dump(settings | {"metronome": {"cpu": True, "loss": "a3po"}}))
    (found / "user.py").write_text(SCRIPT)
    (found / "reads.py").write_text(READS)
    (found / "sft.py").write_text(READS)
    return found


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    """AReaL's own names stand in their places again."""
    import areal
    import areal.api.cli_args
    import areal.trainer.rl_trainer

    for module, name in (
        (areal, "PPOTrainer"),
        (areal.trainer, "PPOTrainer"),
        (areal.trainer.rl_trainer, "PPOTrainer"),
        (areal.api.cli_args, "load_expr_config"),
        (areal.api.cli_args, "to_structured_cfg"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    standing = dict(ledger._standing)
    yield
    ledger._standing.clear()
    ledger._standing.update(standing)


def read(folder, *arguments, script="reads.py", config="plain.yaml"):
    """What a script that reads its configuration has at its end."""
    seen = {}
    original = launch.runpy.run_path

    def kept(path, run_name):
        seen.update(original(path, run_name=run_name))

    launch.runpy.run_path = kept
    try:
        code = launch.main([str(folder / script), "--config", str(folder / config), *arguments])
    finally:
        launch.runpy.run_path = original
    return code, seen


def refused(capsys, folder, *arguments, **named):
    code, _ = read(folder, *arguments, **named)
    assert code == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("metronome: ")]
    assert len(said) == 1
    assert said[0].startswith("metronome: error: ")
    return said[0]


def test_help_names_every_key_of_ours(capsys):
    assert launch.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert launch.main([]) == 2
    assert "usage: python -m metronome_areal user_script.py --config FILE" in said
    for key in ("rollout_source", "loss", "attention", "group_controller", "in_flight", "cpu"):
        assert f"metronome.{key} " in said


def test_our_trainer_stands_wherever_a_script_may_look(folder):
    code, seen = read(folder)
    assert code == 0
    (trainer,) = seen["trainers"]
    assert trainer is room.PPOTrainer
    assert not hasattr(seen["config"], "metronome")  # nothing was written, nothing is added
    host.check_host()  # sees AReaL's own methods behind ours
    assert sys.argv == [str(folder / "reads.py"), "--config", str(folder / "plain.yaml")]


@pytest.mark.parametrize("config", ["plain.yaml", "block.yaml"])
@pytest.mark.parametrize("sign", ["", "++"])
def test_keys_of_ours_stand_in_the_yaml_or_on_the_command_line(folder, config, sign):
    code, seen = read(
        folder,
        *("metronome.cpu=true", "metronome.loss=a3po", "metronome.a3po.cap=4.0"),
        *(f"{sign}metronome.rollout_source=bounded", "metronome={bounded: {max_staleness: 3}}"),
        "+actor.eps_clip=0.3",
        config=config,
    )
    assert code == 0
    assert seen["config"].metronome == {
        "cpu": True,
        "loss": "a3po",
        "a3po": {"cap": 4.0},
        "rollout_source": "bounded",
        "bounded": {"max_staleness": 3},
    }
    assert seen["config"].actor.eps_clip == 0.3
    assert type(seen["config"]).__mro__[1].__name__ == "GRPOConfig"


def test_only_our_keys_are_rewritten():
    given = ["metronome.loss=a3po", "metronome={cpu: true}", "+metronome.cpu=true", "~metronome", "metronomes.x=1"]
    assert overrides(given) == ["++metronome.loss=a3po", "++metronome={cpu: true}", *given[2:]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["metronome.los=a3po"], ["unknown key", "'los'", "use 'loss'"]),
        (["metronome.loss=a3poo"], ["a3poo", "use 'a3po'"]),
        (["metronome.loss=a3po", "metronome.a3po.capp=4"], ["capp", "use 'cap'"]),
        (["metronome.a3po.cap=4"], ["isn't selected", "'a3po'"]),
        (["metronome.rollout_source=periodik"], ["use 'periodic'"]),
        (["metronome.in_flight=abort"], ["metronome.in_flight", "metronome.rollout_source=bounded, or leave"]),
        (["metronome.cpu=3"], ["true or false"]),
        (["metronom.loss=a3po"], ["'metronom", "use 'metronome'"]),
        (["actor.eps_clp=0.3"], ["'actor.eps_clp'", "use 'eps_clip'"]),
        (["actor.optimizer.lrr=0.3"], ["'actor.optimizer.lrr'", "use 'lr'"]),
        (["actor.eps_clip=0.3"], ["no such key to override", "+actor.eps_clip=0.3 adds it"]),
        (["scheduler.type=null"], ["no such key to override", "'scheduler.type'", "+scheduler.type=null adds it"]),
        (["metronome.loss=a3po", "+metronome.loss=ppo"], ["given twice", "'a3po, then ppo'", "metronome.loss"]),
        (["actor.path=/nowhere"], ["there is no such folder", "'/nowhere'", "actor.path"]),
        (["tokenizer_path=./nowhere"], ["there is no such folder", "'./nowhere'", "tokenizer_path"]),
        (["+actor.eps_clip=much"], ["'actor.eps_clip'", "much"]),
        (["+actor.eps_clp=0.3"], ["'actor.eps_clp'", "use 'eps_clip'"]),
        (["actor.adv_norm.mean_level=groop"], ["mean_level must be", "groop"]),
        (["actor.backend=???"], ["missing", "'actor.backend'", "actor.backend=VALUE"]),
        (["actor.eps_clip"], ["actor.eps_clip"]),
        (["+gconfig.n_samples=4"], ["gconfig.n_samples"]),
    ],
)
def test_a_wrong_key_is_one_line(capsys, folder, arguments, words):
    said = refused(capsys, folder, *arguments)
    for word in words:
        assert word in said


def test_a_key_given_twice_alike_is_a_key(folder):
    code, seen = read(folder, "metronome.loss=a3po", "metronome.loss=a3po", "metronome.cpu=true")
    assert code == 0
    assert seen["config"].metronome == {"loss": "a3po", "cpu": True}


@pytest.mark.parametrize("key", ["metronome.los=a3po", "actor.path=/nowhere"])
def test_what_is_refused_leaves_nothing_among_the_logs(capsys, folder, tmp_path, key):
    logs = f"stats_logger.fileroot={tmp_path / 'logs'}"
    refused(capsys, folder, key, logs)
    assert not (tmp_path / "logs").exists()
    assert read(folder, logs)[0] == 0
    assert (tmp_path / "logs").exists()


def test_a_model_that_can_only_be_a_folder_is_one(tmp_path, monkeypatch):
    (tmp_path / "home" / "model").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "home")
    there = {key: str(tmp_path / "home" / "model") for key in ("actor", "ref", "critic", "tokenizer_path")}

    def checking(found, kl_ctl=0.1):
        sections = {key: SimpleNamespace(path=found[key], kl_ctl=kl_ctl) for key in ("actor", "ref", "critic")}
        check_paths(SimpleNamespace(**sections, tokenizer_path=found["tokenizer_path"]))

    for path in (there["actor"], "./model", "Qwen/Qwen2.5-1.5B", "nowhere", ""):
        checking(dict.fromkeys(there, path))
    for key in there:
        for path in ("/nowhere", "./nowhere", "../nowhere", "~/nowhere", "~/model"):
            with pytest.raises(ConfigurationError, match="there is no such folder") as found:
                checking({**there, key: path})
            assert found.value.where == (key if key == "tokenizer_path" else f"{key}.path")
            assert found.value.found == path
            assert ("~ isn't expanded" in found.value.remedy) == (path == "~/model")
    checking({**there, "ref": "/nowhere"}, kl_ctl=0.0)  # AReaL makes none


def test_ctrl_c_is_one_line_and_130(capsys, tmp_path):
    (tmp_path / "interrupted.py").write_text("raise KeyboardInterrupt")
    assert launch.main([str(tmp_path / "interrupted.py")]) == 130
    assert capsys.readouterr().err == "metronome: error: interrupted\n"


def test_ctrl_c_closes_the_trainer_without_areal_s_traceback_and_ends_workers_that_don_t_answer(capsys, monkeypatch):
    one = room.PPOTrainer.__new__(room.PPOTrainer)
    closed, logged = [], []
    monkeypatch.setattr(rl_trainer.logger, "error", lambda *said, **_: logged.append(said))
    one.close = lambda: closed.append(1)
    one.scheduler = None
    error = KeyboardInterrupt()
    assert not one.__exit__(KeyboardInterrupt, error, None)
    assert not one.__exit__(None, None, None)
    assert (closed, logged) == ([1, 1], [])
    assert not one.__exit__(ValueError, ValueError("x"), None)  # AReaL's own
    assert (len(closed), len(logged)) == (3, 1)

    def gone():
        raise ConnectionError

    one.close, one.scheduler = gone, SimpleNamespace(delete_workers=lambda: closed.append("workers"))
    assert not one.__exit__(KeyboardInterrupt, error, None)
    assert closed[-1] == "workers"
    assert "close() raised ConnectionError" in capsys.readouterr().out
    with pytest.raises(ConnectionError):
        one.__exit__(ValueError, ValueError("x"), None)


def test_a_misspelt_key_in_the_yaml_is_one_line(capsys, folder):
    settings = yaml.safe_load((folder / "plain.yaml").read_text())
    settings["actor"]["eps_clp"] = 0.3
    (folder / "misspelt.yaml").write_text(yaml.safe_dump(settings))
    said = refused(capsys, folder, config="misspelt.yaml")
    assert "AReaL has no such key; found 'actor.eps_clp'" in said
    assert "use 'eps_clip'" in said
    del settings["actor"]["eps_clp"]
    (folder / "misspelt.yaml").write_text(yaml.safe_dump(settings | {"metronom": {"loss": "a3po"}}))
    assert "use 'metronome'" in refused(capsys, folder, config="misspelt.yaml")
    (folder / "misspelt.yaml").write_text("a: [")
    assert "--config" in refused(capsys, folder, config="misspelt.yaml")


def test_keys_are_those_of_areal_s_classes():
    from metronome_areal.config import GRPOConfig

    assert "metronome" in keys_at(GRPOConfig, [])
    assert "lr" in keys_at(GRPOConfig, ["actor", "optimizer"])
    assert "eps_clip" in keys_at(GRPOConfig, ["ref"])  # a section that may be null
    assert "gpu" in keys_at(GRPOConfig, ["actor", "scheduling_spec"])  # of a list
    assert keys_at(GRPOConfig, ["seed"]) == keys_at(GRPOConfig, ["nothing"]) == []


def test_a_trainer_without_our_hooks_refuses_a_block(capsys, folder):
    said = refused(capsys, folder, "metronome.loss=a3po", script="sft.py")
    assert "our hooks are in AReaL's PPOTrainer" in said
    assert "SFTConfig" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.py"], ["there is no such script", "nowhere.py"]),
        (["{}/user.py", "--config", "{}/nowhere.yaml"], ["there is no such file", "nowhere.yaml", "--config"]),
        (["{}/user.py", "--config={}/nowhere.yaml"], ["there is no such file", "nowhere.yaml", "--config"]),
    ],
)
def test_what_isn_t_there_is_said_before_areal_is_imported(capsys, monkeypatch, folder, arguments, words):
    monkeypatch.setattr(host, "check_host", None)
    assert launch.main([one.format(folder) for one in arguments]) == 2
    said = capsys.readouterr().err
    for word in words:
        assert word in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("found", ["1.0.3", "1.1.0", "2.0.0"])
def test_another_release_is_refused(capsys, monkeypatch, folder, found):
    monkeypatch.setattr(host, "version", lambda name: found)
    said = refused(capsys, folder)
    assert f"'{found}'" in said
    assert "pip install 'areal>=1.0.4,<1.1'" in said


def test_a_method_with_other_arguments_is_refused_by_name(capsys, monkeypatch, folder):
    def _compute_advantages(self, data, more):
        pass

    monkeypatch.setattr(PPOActor, "_compute_advantages", _compute_advantages)
    said = refused(capsys, folder)
    assert "PPOActor._compute_advantages" in said
    assert "self, data, more" in said
    monkeypatch.delattr(PPOActor, "_compute_advantages")
    assert "'missing'" in refused(capsys, folder)


def test_an_error_that_isn_t_ours_goes_through(tmp_path):
    (tmp_path / "broken.py").write_text("raise KeyError('x')")
    with pytest.raises(KeyError):
        launch.main([str(tmp_path / "broken.py")])


def test_the_room_is_known_before_areal_is_imported(tmp_path):
    path = tmp_path / "c.yaml"
    for text, said, wanted in (
        ("metronome: {cpu: true}", [], True),
        ("metronome: {cpu: true}", ["metronome.cpu=false"], False),
        ("metronome: {loss: a3po}", [], None),
        ("metronome: a3po", [], None),
        ("", [], None),
        ("seed: ${x}", ["+metronome.cpu=true"], True),
        ("seed: 1", ["++metronome.cpu=True"], True),
    ):
        path.write_text(text)
        assert launch._written("metronome.cpu", said, path) is wanted
    assert launch._written("metronome.cpu", [], None) is None
    path.write_text("scheduler: {type: local}")
    assert launch._written("scheduler.type", [], path) == "local"
    assert launch._written("scheduler.type", ["scheduler.type=null"], path) is None


# ---- real runs -------------------------------------------------------------------------------------------------------


def started(*command, folder, **environment):
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "AREAL_SPMD_MODE")
    }
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=400,
        env=clean | environment,
        cwd=folder,
    )


def test_a_user_s_script_trains_with_our_hooks_unchanged(folder):
    done = started(
        *("-m", "metronome_areal", "user.py", "--config", "plain.yaml", f"+prompts={folder / 'prompts.jsonl'}"),
        *("metronome.cpu=true", "metronome.loss=a3po", "metronome.rollout_source=periodic"),
        folder=folder,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "script: trained by metronome_areal.trainer to version 2" in done.stdout
    assert "metronome: rollout.max_head_offpolicyness=" in done.stdout


def test_ctrl_c_in_training_ends_every_process_without_a_traceback(folder):
    """The terminal interrupts the whole group: the run, and AReaL's processes of rewards."""
    command = ("-m", "metronome_areal", "user.py", "--config", "plain.yaml", f"+prompts={folder / 'prompts.jsonl'}")
    keys = ("metronome.cpu=true", "metronome.rollout_source=periodic", "total_train_epochs=999")
    one = subprocess.Popen(
        [sys.executable, *command, *keys, "total_train_steps=9999"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        start_new_session=True,
    )
    said = ""
    for line in one.stdout:
        said += line
        if "Train step 2/" in line:
            os.killpg(one.pid, signal.SIGINT)
    assert one.wait(60) == 130, said[-3000:]
    assert "Traceback" not in said
    assert said.count("metronome: error: interrupted") == 1
    with pytest.raises(ProcessLookupError):  # nobody is left of its group
        os.killpg(one.pid, 0)


def test_without_the_launcher_the_same_script_refuses_the_block(folder):
    done = started("user.py", "--config", "block.yaml", folder=folder)
    assert done.returncode == 1
    assert "Key 'metronome' not in 'MyConfig'" in done.stderr


TWO_LINES = """
import sys
from metronome_areal.launch import main; sys.exit(main(["user.py", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("program", [["-m", "metronome_areal", "user.py"], ["launched.py"]], ids=["module", "script"])
def test_two_ranks_under_torchrun(folder, program):
    """The second is what AReaL's deprecated SPMD launcher starts: torchrun, and its own command line behind it."""
    (folder / "launched.py").write_text(TWO_LINES)
    done = started(
        *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *program),
        *("--config", "block.yaml", f"+prompts={folder / 'prompts.jsonl'}", "+metronome.rollout_source=periodic"),
        folder=folder,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("script: trained by metronome_areal.trainer to version 2") == 2
    assert "actor.backend=fsdp:d2" in done.stdout


def test_areal_s_own_launcher_reads_the_command_line_of_a_script_and_of_nothing_else(folder):
    """It wasn't run: on a CPU it composes a command that no shell takes."""
    from areal.api.cli_args import parse_cli_args
    from hydra.errors import HydraException

    given = ["--config", str(folder / "block.yaml"), "+metronome.rollout_source=periodic"]
    config, _ = parse_cli_args(["launched.py", *given])
    assert config.metronome == {"cpu": True, "loss": "a3po", "rollout_source": "periodic"}
    for program in (["-m", "metronome_areal", "user.py"], ["metronome_areal.py", "user.py"]):
        with pytest.raises(HydraException):
            parse_cli_args([*program, *given])


def test_the_classes_of_ours_need_no_launcher(folder):
    """``from metronome_areal import PPOTrainer, GRPOConfig`` in a script of AReaL's."""
    text = SCRIPT.replace("from areal import PPOTrainer", "from metronome_areal import GRPOConfig, PPOTrainer")
    text = text.replace("GRPOConfig, load_expr_config", "load_expr_config")
    (folder / "ours.py").write_text(text)
    done = started(
        *("ours.py", "--config", "plain.yaml", f"+prompts={folder / 'prompts.jsonl'}"),
        *("+metronome.cpu=true", "+metronome.loss=a3po"),
        folder=folder,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "script: trained by metronome_areal.trainer to version 2" in done.stdout
