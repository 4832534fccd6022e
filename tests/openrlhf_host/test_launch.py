"""``python -m metronome_openrlhf`` before anything is trained: what it says, what it refuses, and when."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need OpenRLHF (requirements/openrlhf.txt)")

import openrlhf_room  # noqa: F401  (attaches the CPU room)
import ray

from metronome.errors import ConfigurationError, PluginError, VersionMismatch, WaitTimeout
from metronome_openrlhf import bind, cluster, cpu, host, launch
from metronome_openrlhf.checks import ZeroRate
from metronome_openrlhf.cpu import assets
from metronome_openrlhf.cpu import cluster as room_cluster
from metronome_openrlhf.seen import Seen
from metronome_openrlhf.smoke import SMOKE
from metronome_patches import ledger

CPU = "--metronome.cpu"
PLAIN = [
    *(CPU, "--actor.model_name_or_path", "model", "--vllm.num_engines", "1", "--algo.advantage.estimator", "rloo"),
    *("--rollout.n_samples_per_prompt", "4", "--reward.remote_url", "http://r", "--data.prompt_dataset", "d"),
]


@pytest.fixture(autouse=True)
def _as_it_was():
    before = sys.argv
    yield
    sys.argv = before
    bind._listeners.clear()


@pytest.fixture
def no_ray(monkeypatch):
    """Ray doesn't start; what would be started."""
    started = []
    monkeypatch.setattr(cluster, "start", started.append)
    return started


def refused(capsys, *flags):
    assert launch.main(flags) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("metronome: error: ")
    return said


# ---- flags ----------------------------------------------------------------------------------------------------------


def test_help_shows_our_flags_before_openrlhf_s(capsys, no_ray):
    assert launch.main([CPU, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.index("--metronome.rollout_source") < said.index("usage:") < said.index("--vllm.num_engines")
    assert not no_ray


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--metronome.los", "a3po"], ["unknown key", "'los'", "use 'loss'"]),
        (["--metronome.sagc.delta", "0.1"], ["sagc"]),
        (["--metronom.loss", "a3po"], ["--metronom.loss", "to mend: --metronome.loss VALUE"]),
        (["--metronme.loss=a3po"], ["--metronme.loss=a3po", "to mend: --metronome.loss VALUE"]),
        (["--metronome.loss", "ppo", "--metronome.loss", "a3po"], ["given twice"]),
        (["--metronome.cpu", "3"], ["takes no value"]),
    ],
)
def test_a_wrong_flag_of_ours_is_refused_before_openrlhf_is_imported(capsys, monkeypatch, flags, words):
    monkeypatch.setattr(launch, "run", None)
    said = refused(capsys, *flags)
    for word in words:
        assert word in said


def test_help_says_why_openrlhf_s_part_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(launch, "openrlhf_folder", lambda: None)
    assert launch.main(["-h"]) == 0
    said = capsys.readouterr().out
    assert "--metronome.rollout_source" in said
    assert "OpenRLHF's own help can't be shown: OpenRLHF isn't installed" in said
    monkeypatch.setattr(launch, "openrlhf_folder", lambda: tmp_path)
    assert launch.main(["-h"]) == 0
    assert "can't be shown: OpenRLHF's main isn't the one" in capsys.readouterr().out


def test_what_is_nobody_s_flag_is_refused_with_the_nearest_of_openrlhf_s(capsys, no_ray):
    said = refused(capsys, *PLAIN, "--train.batchsize", "3")
    assert "--train.batchsize" in said
    assert "use '--train.batch_size'" in said
    assert not no_ray


def test_openrlhf_s_own_parser_refuses_it_without_a_flag_of_ours(capsys, no_ray):
    with pytest.raises(SystemExit) as end:
        launch.main([*PLAIN[1:], "--train.batchsize", "3"])
    assert end.value.code == 2
    assert "--train.batchsize" in capsys.readouterr().err
    assert not no_ray


# ---- the end of a run -----------------------------------------------------------------------------------------------


class Trainer:
    """Ray's handle of a trainer that saw ``seen``."""

    def __init__(self, seen):
        self.metronome_seen = SimpleNamespace(remote=lambda: seen)


@pytest.fixture
def ends(monkeypatch, tmp_path):
    """OpenRLHF's main, which parses, starts a trainer and ends."""
    seen = Seen()
    seen.add({"metronome/loss/calls": 4.0, "metronome/loss/staleness_max": 0.0, "reward": 1.0})
    monkeypatch.setattr(bind.sys, "argv", sys.argv)
    monkeypatch.setattr(ray, "get", lambda found: found)

    def run_module(*_, **__):
        args = SimpleNamespace(ckpt=SimpleNamespace(path=str(tmp_path), output_dir="./ckpt"))
        bind._listeners[0](args)
        bind.Kept(SimpleNamespace(remote=lambda *_: Trainer(seen))).remote("model")

    monkeypatch.setattr(launch.runpy, "run_module", run_module)
    monkeypatch.setattr(launch, "check_typed", lambda *_: [])
    monkeypatch.setattr(cluster, "start", lambda device: None)
    monkeypatch.setattr(cluster, "check_nodes", lambda: None)
    monkeypatch.setattr(bind, "classes", lambda *_: None)
    monkeypatch.setattr("metronome_openrlhf.config.arrange", lambda *_: [])
    monkeypatch.setattr("metronome_openrlhf.cpu.arguments.arrange", lambda *_: [])
    return tmp_path


def test_a_run_ends_with_what_was_seen_and_where_the_model_is(ends, capsys, monkeypatch):
    assert launch.main([CPU, "--metronome.loss", "a3po"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "metronome: 1 step; loss a3po, 4 calls; no sample of an old version; model in ./ckpt"
    (ends / "_actor").mkdir()
    (ends / "_actor" / "latest").touch()
    assert launch.main([CPU, "--metronome.loss", "a3po"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"model in ./ckpt, checkpoints in {ends}")
    monkeypatch.setenv(SMOKE, "1")  # it has a line of its own
    assert launch.main([CPU, "--metronome.loss", "a3po"]) == 0
    assert "1 step" not in capsys.readouterr().out


def test_a_trainer_that_is_gone_doesn_t_fail_a_run_that_ended_well(ends, capsys, monkeypatch):
    def get(_):
        raise ray.exceptions.RayActorError()

    monkeypatch.setattr(ray, "get", get)
    assert launch.main([CPU, "--metronome.loss", "a3po"]) == 0
    assert "step" not in capsys.readouterr().out


def test_long_runs_are_told_in_short():
    seen = Seen()
    for size in (4, 8, 4, 16, 8, 8, 8, 8, 8):
        seen.add({"metronome/group_controller/size": size, "metronome/attention/tokens_fed": 1})
    assert seen.told() == "9 steps; 9 tokens fed for 0; G 4 to 16, at last 8"


def test_a_step_that_moves_no_weight_says_why_once(capsys):
    args = SimpleNamespace(actor=SimpleNamespace(lr_warmup_ratio=0.03), train=SimpleNamespace(batch_size=128))
    still = {"metronome/weights/lr": 0.0, "actor_lr": 1e-6}
    say = ZeroRate(args)
    say({"metronome/weights/lr": 1e-6}, 0)
    say({}, 0)  # a step without the actor
    assert capsys.readouterr().out == ""
    say = ZeroRate(args)
    say(still, 0)
    say(still, 1)
    assert capsys.readouterr().out == (
        "metronome: step 1 leaves the weights as they are: its learning rate is 0: OpenRLHF's warm-up begins there,"
        " and --actor.lr_warmup_ratio 0 leaves it out\n"
    )
    for status, step in (({**still, "actor_lr": 0.0}, 0), (still, 4)):  # no step was taken
        ZeroRate(args)(status, step)
        assert "its rows fill no --train.batch_size 128" in capsys.readouterr().out


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), ([], 2), (["--folder"], 2), (["a", "b"], 2)])
def test_the_maker_of_the_tiny_model_says_how_it_is_called(capsys, monkeypatch, tmp_path, arguments, code):
    monkeypatch.chdir(tmp_path)
    assert assets.main(arguments) == code
    said = capsys.readouterr()
    assert "metronome_openrlhf.cpu.assets FOLDER" in (said.err if code else said.out)
    assert not list(tmp_path.iterdir())


def test_the_maker_of_the_tiny_model_prints_the_flags_for_it(capsys, tmp_path):
    assert assets.main([str(tmp_path / "tiny")]) == 0
    assert f"--actor.model_name_or_path {tmp_path / 'tiny' / 'model'}" in capsys.readouterr().out
    assert (tmp_path / "tiny" / "reward.py").is_file()


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_what_can_t_be_true_together_is_refused_before_ray_starts(capsys, no_ray):
    periodic = [*PLAIN, "--metronome.rollout_source", "periodic"]
    assert "--train.async_enable" in refused(capsys, *periodic, "--train.async_enable")
    assert "--ds.packing_samples" in refused(capsys, *PLAIN, "--ds.packing_samples")
    assert "'a3po'" in refused(capsys, *PLAIN, "--metronome.loss", "a3pp")
    assert "use 'cap'" in refused(capsys, *PLAIN, "--metronome.loss", "a3po", "--metronome.a3po.capp", "5")
    assert not no_ray


def test_an_error_of_a_worker_is_said_in_one_line(capsys, monkeypatch):
    own = VersionMismatch("a sample is too old", found=3, where="step 4", remedy="a longer bound")

    def run(*_):
        raise ray.exceptions.RayTaskError("train", "a long traceback", own).as_instanceof_cause()

    monkeypatch.setattr(launch, "run", run)
    assert launch.main(PLAIN) == 1
    assert capsys.readouterr().err == f"metronome: error: {own}\n"


def test_an_error_that_isn_t_ours_goes_through(monkeypatch):
    def run(*_):
        raise ray.exceptions.RayTaskError("train", "a long traceback", KeyError("x")).as_instanceof_cause()

    monkeypatch.setattr(launch, "run", run)
    with pytest.raises(KeyError):
        launch.main(PLAIN)


# ---- which OpenRLHF -------------------------------------------------------------------------------------------------


def test_this_openrlhf_is_one_that_we_know():
    host.check_host()


@pytest.mark.parametrize("found", ["0.11.1", "0.12.0", "0.10.3"])
def test_another_release_is_refused(capsys, monkeypatch, found):
    monkeypatch.setattr(host, "version", lambda name: found)
    said = refused(capsys, *PLAIN)
    assert f"'{found}'" in said
    assert "pip install 'openrlhf>=0.11.2,<0.12'" in said


def test_the_room_refuses_another_release_by_itself(monkeypatch):
    monkeypatch.setattr(cpu, "_attached", False)
    monkeypatch.setattr(ledger, "version", lambda name: "0.12.0")
    with pytest.raises(PluginError, match=r"the CPU room was written for openrlhf >=0.11.2,<0.12"):
        cpu.attach()


def test_a_patch_release_is_taken(monkeypatch):
    monkeypatch.setattr(host, "version", lambda name: "0.11.3")
    host.check_host()


def test_a_method_with_other_arguments_is_refused_by_name(capsys, monkeypatch):
    from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

    def training_step(self, experience, step, kl_ctl):
        pass

    monkeypatch.setattr(ActorPPOTrainer, "training_step", training_step)
    said = refused(capsys, *PLAIN, "--metronome.loss", "a3po")
    assert "OpenRLHF's ActorPPOTrainer.training_step" in said
    assert "self, experience, step, kl_ctl" in said
    assert "openrlhf==0.11.2" in said


def test_a_method_that_is_gone_is_refused_by_name(capsys, monkeypatch):
    from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker

    monkeypatch.delattr(RemoteExperienceMaker, "make_experience")
    said = refused(capsys, *PLAIN)
    assert "RemoteExperienceMaker.make_experience" in said
    assert "'missing'" in said


# ---- Ray's nodes ----------------------------------------------------------------------------------------------------


@pytest.fixture
def hidden(tmp_path):
    """Variables of a worker that doesn't find this package."""
    found = str(Path(launch.__file__).parents[1])
    (tmp_path / "sitecustomize.py").write_text(
        f"import sys\nsys.path[:] = [one for one in sys.path if one != {found!r}]"
    )
    return {"PYTHONPATH": str(tmp_path)}


@pytest.fixture
def ray_folder(monkeypatch, tmp_path_factory):
    import shutil
    import tempfile

    # Short: Ray's sockets lie below it, and their paths may have 107 characters.
    folder = tempfile.mkdtemp(prefix="mray")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    yield folder
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def test_workers_attach_the_room_and_other_versions_on_a_node_are_refused(ray_folder, monkeypatch):
    cluster.start("cpu")
    cluster.start("cpu")  # joined already

    @ray.remote(num_gpus=1)
    def there():
        import os

        from metronome_patches.ledger import applied

        import torch  # isort: skip

        return os.environ["DS_ACCELERATOR"], str(torch.cuda.current_device()), "sys:meta_path" in applied()

    assert ray.get(there.remote()) == ("cpu", "cpu", True)
    cluster.check_nodes()
    monkeypatch.setattr(cluster, "installed", lambda: "9.9")
    with pytest.raises(ConfigurationError, match=r"another metronome-rl than the launcher's 9.9.*pip install"):
        cluster.check_nodes()
    monkeypatch.setattr(ray, "wait", lambda refs, **_: ([], refs))
    with pytest.raises(WaitTimeout, match="didn't answer within 7 s"):
        cluster.check_nodes(7)


def test_a_node_without_the_package_is_named(ray_folder, hidden):
    room_cluster.start(hidden)
    name = ray.nodes()[0]["NodeManagerHostname"]
    with pytest.raises(ConfigurationError, match=f"{name}: no worker starts there"):
        cluster.check_nodes()
    ray.shutdown()
    # without the room, a worker starts and answers
    ray.init(address="local", include_dashboard=False, runtime_env={"env_vars": hidden})
    with pytest.raises(ConfigurationError, match=f"{name}: not installed"):
        cluster.check_nodes()


def test_ray_that_does_not_start_is_tried_again(monkeypatch):
    tried = []

    def init(**named):
        tried.append(named)
        raise Exception("The current node timed out during startup.\nmore")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(room_cluster.time, "sleep", lambda seconds: None)
    with pytest.raises(WaitTimeout, match="Ray didn't start in 3 attempts; found 'The current node timed out"):
        room_cluster.start({})
    assert len(tried) == 3
    assert all(one["runtime_env"]["worker_process_setup_hook"] == cpu.HOOK for one in tried)


def test_a_job_with_a_hook_of_its_own_is_refused(monkeypatch):
    def init(**_):
        raise RuntimeError("Conflicting values for worker_process_setup_hook.")

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigurationError, match="set-up hook of its own"):
        room_cluster.start({})
