"""What a user can get wrong: one line that says what to write, exit code 2, nothing started and nothing written."""

import os
import re
import subprocess
import sys
from importlib.metadata import distributions

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need openrlhf (requirements/openrlhf.txt)")

import openrlhf_controller
import openrlhf_room  # noqa: F401  (attaches the CPU room)
import ray
from openrlhf_controller import Engine, build

from metronome.errors import ConfigurationError, MetronomeError
from metronome_openrlhf import bind, cluster, host, launch
from metronome_openrlhf.flags import take
from metronome_openrlhf.paths import check_paths

CPU = "--metronome.cpu"
PLAIN = [
    *(CPU, "--actor.model_name_or_path", "m", "--reward.remote_url", "http://r", "--data.prompt_dataset", "d"),
    *("--algo.advantage.estimator", "group_norm", "--rollout.n_samples_per_prompt", "4", "--algo.kl.init_coef", "0"),
    *("--rollout.batch_size", "8", "--train.batch_size", "32", "--train.micro_batch_size", "4"),
    *("--rollout.micro_batch_size", "4", "--actor.num_gpus_per_node", "1", "--vllm.num_engines", "1"),
]
A3PO = ("--metronome.loss", "a3po")
BOUNDED = ("--metronome.rollout_source", "bounded")
PERIODIC = ("--metronome.rollout_source", "periodic")
FIXED = ("--metronome.group_controller", "fixed")
SAGC = ("--metronome.group_controller", "sagc")
INSTALLED = {str(one.metadata["Name"]).lower().replace("_", "-") for one in distributions()}


@pytest.fixture
def launched(monkeypatch, capsys, tmp_path):
    """``launch.main`` up to Ray's start; the error's line, after a look at what was left behind."""
    classes = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(cluster, "start", lambda device: pytest.fail("Ray would have started"))
    monkeypatch.setattr(bind, "classes", lambda *_: classes.append(1))

    def refused(*flags):
        assert launch.main([*PLAIN, *flags]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert lines[0].startswith("metronome: error: ")
        assert not ray.is_initialized()
        assert not classes
        assert not list(tmp_path.iterdir())
        return lines[0]

    yield refused
    bind._listeners.clear()


REFUSED = [
    # misspelt
    (("--metronome.rolout_source", "periodic"), "'rolout_source'; in --metronome; to mend: use 'rollout_source'"),
    ((*A3PO, "--metronome.a3po.clp_low", "0.1"), "'clp_low'; in metronome.a3po; to mend: use 'clip_low'"),
    ((*A3PO, "--metronome.a3po.clp_low=0.1"), "'clp_low'; in metronome.a3po; to mend: use 'clip_low'"),
    (("--metronome.loss", "A3PO"), "no plug-in offers this loss; found 'A3PO'"),
    (("--metronome.Loss", "a3po"), "to mend: use 'loss'"),
    (("--Metronome.loss", "a3po"), "to mend: --metronome.loss VALUE"),
    (("--metronome", "a3po"), "to mend: --metronome.KEY VALUE"),
    (("--metronome.attention", "shared"), "to mend: use 'shared_prompt'"),
    ((*BOUNDED, "--metronome.bounded.max_stalenes", "1"), "to mend: use 'max_staleness'"),
    # no value
    (
        ("--metronome.loss",),
        "loss must be a plug-in's name; found True; in --metronome.loss; to mend: --metronome.loss a3po | ppo",
    ),
    (("--metronome.loss=",), "loss must be a plug-in's name"),
    ((*A3PO, "--metronome.a3po.cap"), "found True; in metronome.a3po.cap; to mend: cap: a value of its own"),
    ((*BOUNDED, "--metronome.bounded.max_staleness"), "found True; in metronome.bounded.max_staleness"),
    ((*FIXED, "--metronome.fixed.size"), "found True; in metronome.fixed.size"),
    ((*BOUNDED, "--metronome.in_flight"), "unknown value; found True; in --metronome.in_flight"),
    # twice, or a value and options
    ((*A3PO, "--metronome.loss=ppo"), "given twice; found 'a3po'"),
    ((*A3PO, "--metronome.a3po", "{cap: 5}", "--metronome.a3po.cap=6"), "given twice; found 5"),
    ((*A3PO, "--metronome.a3po", "5"), "options must be a mapping; found 5"),
    ((*A3PO, "--metronome.a3po", "{5: 5}"), "option names must be strings"),
    # not selected
    (("--metronome.bounded.max_staleness", "2"), "isn't selected; found 'bounded'"),
    (("--metronome.loss", "ppo", "--metronome.a3po.cap", "5"), "isn't selected; found 'a3po'"),
    (("--metronome.sagc.sizes", "[2,4]"), "isn't selected; found 'sagc'"),
    # bad values
    ((*A3PO, "--metronome.a3po.cap", "abc"), "found 'abc'; in metronome.a3po.cap; to mend: cap: a number"),
    ((*A3PO, "--metronome.a3po.cap", ".nan"), "to mend: set cap to 1 or more"),
    (
        (*BOUNDED, "--metronome.bounded.max_staleness", "1.5"),
        "in metronome.bounded.max_staleness; to mend: max_staleness: a whole number",
    ),
    ((*SAGC, "--metronome.sagc.sizes", "4,8"), "in metronome.sagc.sizes; to mend: sizes: a list, as [4, 8]"),
    ((*SAGC, "--metronome.sagc.sizes", "[4,8"), "not valid YAML"),
    ((*FIXED, "--metronome.fixed.size", "1"), "to mend: size: 2 or more"),
    # what can't be divided
    ((*FIXED, "--metronome.fixed.size", "3"), "half-filled accumulation window; found '24 rows, 32 a window'"),
    ((*SAGC, "--metronome.sagc.sizes", "[4,5]"), "G = 5 leaves a half-filled accumulation window"),
    ((*BOUNDED, "--rollout.batch_size", "6"), "6 groups of G = 4 leaves a half-filled accumulation window"),
    ((*BOUNDED, "--train.batch_size", "0"), "found 0; in --train.batch_size"),
    ((*PERIODIC, "--train.micro_batch_size", "0"), "found 0; in --train.micro_batch_size"),
    # OpenRLHF's own flags beside ours
    (
        (*A3PO, "--train.batch_sise", "8"),
        "batch_sise 8; in the command line; to mend: use '--train.batch_size'",
    ),
    (
        (*A3PO, "stray"),
        "unrecognized arguments: stray; in the command line; to mend: python -m metronome_openrlhf --help",
    ),
    (
        ("--train.batch_size", "eight"),
        "OpenRLHF's parser refuses these flags: argument --train.batch_size: invalid int",
    ),
    (
        ("--rollout.n_samples_per_prompt", "1"),
        "error: OpenRLHF refuses these flags: group_norm requires n_samples_per_prompt > 1; in the command line",
    ),
    (("--train.partial_rollout_enable",), "OpenRLHF refuses these flags: --train.partial_rollout_enable requires"),
    (
        ("--train.colocate_actor_ref", "--algo.kl.init_coef", "0.1"),
        "found '1 x 8'; in --ref; to mend: --ref.num_nodes 1, --ref.num_gpus_per_node 1",
    ),
    # paths
    (("--reward.remote_url", "/nowhere/r.py"), "no such file or folder; found '/nowhere/r.py'; in --reward.remote_url"),
    (("--reward.remote_url", "http://a,r.py"), "no such file or folder; found 'r.py'; in --reward.remote_url"),
    (
        ("--reward.remote_url", "~/r.py"),
        "OpenRLHF doesn't expand ~; found '~/r.py'; in --reward.remote_url; to mend: /",
    ),
    (("--train.agent_func_path", "./agent.py"), "found './agent.py'; in --train.agent_func_path"),
    (("--train.agent_func_path", "agent"), "OpenRLHF reads an agent from a Python file; found 'agent'"),
    (("--actor.model_name_or_path", "/nowhere/model"), "found '/nowhere/model'; in --actor.model_name_or_path"),
    (("--actor.model_name_or_path", "~/model"), "OpenRLHF doesn't expand ~; found '~/model'"),
    (("--data.prompt_dataset", "d,./p"), "found './p'; in --data.prompt_dataset"),
    (("--data.prompt_dataset", "p.jsonl"), "found 'p.jsonl'; in --data.prompt_dataset"),
    (("--data.prompt_dataset", "/nowhere@train"), "found '/nowhere'; in --data.prompt_dataset"),
    (("--eval.dataset", "/nowhere/e.parquet"), "found '/nowhere/e.parquet'; in --eval.dataset"),
    (
        ("--reward.remote_url", "", "--reward.model_name_or_path", "../r"),
        "found '../r'; in --reward.model_name_or_path",
    ),
    # what OpenRLHF has no default for
    (("--reward.remote_url", ""), "nothing gives rewards; in --reward.remote_url; to mend: --reward.remote_url or"),
    (("--actor.model_name_or_path", ""), "no model to train; in --actor.model_name_or_path"),
    (("--data.prompt_dataset", ""), "no prompts to train with; in --data.prompt_dataset"),
]


@pytest.mark.parametrize(("flags", "words"), REFUSED, ids=[" ".join(flags)[-60:] for flags, _ in REFUSED])
def test_what_is_wrong_is_said_in_one_line_and_nothing_is_begun(launched, flags, words):
    assert words in launched(*flags)


@pytest.mark.parametrize(
    "flags",
    [
        (*A3PO, "--metronome.a3po.cap", "4"),
        (*A3PO, "--actor.eps_clip_low", "0.2", "0.3"),  # OpenRLHF's parser takes a part of a name
        ("--actor.model_name_or_path", "org/model", "--data.prompt_dataset", "org/data,hf://datasets/o/d.jsonl"),
        ("--data.prompt_dataset", "/data/*.jsonl", "--reward.remote_url", "https://host/r.py,host:5000/judge"),
    ],
)
def test_what_is_right_would_start_ray(launched, flags):
    with pytest.raises(pytest.fail.Exception, match="Ray would have started"):
        launched(*flags)


def test_paths_that_exist_are_taken_and_the_nearest_beside_one_that_doesn_t_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").touch()
    (tmp_path / "model").mkdir()
    found = {"reward.remote_url": "reward.py", "actor.model_name_or_path": "./model", "data.prompt_dataset": "org/d"}
    assert check_paths(found.get, elsewhere=False) == []
    found["reward.remote_url"] = f"{tmp_path}/rewards.py"
    with pytest.raises(ConfigurationError) as refused:
        check_paths(found.get, elsewhere=False)
    assert refused.value.remedy == f"use '{tmp_path / 'reward.py'}'"


def test_a_path_that_another_machine_may_have_is_a_line_where_ray_runs_elsewhere():
    found = {"actor.model_name_or_path": "/nowhere/model", "algo.advantage.estimator": "rloo"}
    assert check_paths(found.get, elsewhere=True) == ["--actor.model_name_or_path /nowhere/model isn't on this machine"]
    with pytest.raises(ConfigurationError, match="doesn't expand ~"):
        check_paths({"actor.model_name_or_path": "~/model"}.get, elsewhere=True)


def test_without_a_flag_of_ours_openrlhf_s_own_checks_are_its_own(monkeypatch):
    monkeypatch.setattr(launch, "check_typed", lambda *_: pytest.fail("looked at"))
    monkeypatch.setattr(launch, "run", lambda block, rest, device: None)
    assert launch.main(["--train.batch_sise", "8"]) == 0


def test_a_switch_needs_no_value_and_a_dash_begins_a_flag():
    block, rest = take([*A3PO, "--metronome.a3po.strict", "--metronome.cpu", "-h"])
    assert block == {"loss": "a3po", "a3po": {"strict": True}, "cpu": True}
    assert rest == ["-h"]
    assert take(["--metronome.a", "-1.5", "--metronome.b", "-0.5"])[0] == {"a": -1.5, "b": -0.5}


@pytest.mark.skipif("flash-attn" in INSTALLED, reason="flash-attn is installed here")
def test_without_flash_attn_and_without_the_room_one_line_names_what_is_missing():
    """The first thing that a laptop's user meets."""
    found = subprocess.run(
        [sys.executable, "-m", "metronome_openrlhf", *PLAIN[1:], *A3PO],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 2
    assert "Traceback" not in found.stderr
    said = found.stderr.splitlines()[-1]
    assert re.match(r"metronome: error: OpenRLHF can't be imported here: .*flash_attn.*--metronome\.cpu", said)


def test_help_needs_nothing_that_openrlhf_needs():
    code = (
        "import sys\n"
        "from metronome_openrlhf.launch import main\n"
        "code = main(['--help'])\n"
        "print(sorted({'ray', 'torch', 'openrlhf', 'vllm', 'flash_attn'} & {*sys.modules}))\n"
        "sys.exit(code)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "[]"
    assert found.stdout.index("--metronome.rollout_source") < found.stdout.index("usage: python -m metronome_openrlhf")
    assert "--vllm.num_engines" in found.stdout


def test_a_module_of_openrlhfs_that_is_gone_is_a_drifted_signature(monkeypatch):
    monkeypatch.setattr(host, "_EXPECTED", (("openrlhf.trainer.other", "X.y", ("self",)),))
    with pytest.raises(ConfigurationError, match=r"OpenRLHF's X\.y isn't the one.*found 'missing'"):
        host.check_host()


# --- while it runs --------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    openrlhf_controller.install(monkeypatch.setattr)
    return tmp_path


class Lacking(Engine):
    """Leaves ``key`` out of the answers of one member, of all where ``member`` is None."""

    key, member = "reward", 1

    def response(self, prompt, label, tokenizer, member):
        found = super().response(prompt, label, tokenizer, member)
        return found | ({self.key: None} if self.member in (None, member) else {})


@pytest.mark.parametrize("source", ["periodic", "synchronous"])
@pytest.mark.parametrize(("member", "count"), [(0, r"\d+"), (1, r"\d+"), (None, r"\d+")])
def test_samples_without_a_reward_are_counted_and_the_place_to_look_is_named(folder, source, member, count):
    """OpenRLHF writes what a reward function raised into the engine's log and goes on."""
    engine = Lacking()
    engine.member = member
    made = build(folder, {"rollout_source": source}, engines=[engine])
    with pytest.raises(MetronomeError, match=rf"without a reward; found '{count} of \d+'; in --reward\.remote_url"):
        made.fit()
    assert "metronome_step" not in made.calls
    assert "fit" not in made.calls


@pytest.mark.parametrize("source", ["periodic", "synchronous"])
def test_samples_without_log_probs_are_refused_where_our_loss_needs_them(folder, source):
    engine = Lacking()
    engine.key, engine.member = "rollout_log_probs", None
    made = build(folder, {"rollout_source": source, "loss": "a3po"}, engines=[engine])
    with pytest.raises(ConfigurationError, match=r"no log-probs.*an agent that returns rollout_log_probs"):
        made.fit()
    made = build(folder, {"rollout_source": source}, engines=[engine])  # OpenRLHF's loss needs none
    made.fit()
    assert len(made.logs) == len(made.metronome_seen().steps) == 4
