"""``python -m metronome_openrlhf`` before anything is trained: what it says, what it refuses, and when."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need OpenRLHF (requirements/openrlhf.txt)")

import openrlhf_room  # noqa: F401  (attaches the CPU room)
import ray

from metronome.errors import ConfigurationError, PluginError, VersionMismatch, WaitTimeout
from metronome_openrlhf import bind, cluster, cpu, host, launch
from metronome_openrlhf.cpu import cluster as room_cluster
from metronome_patches import ledger

CPU = "--metronome.cpu"
PLAIN = [CPU, "--actor.model_name_or_path", "model", "--vllm.num_engines", "1", "--algo.advantage.estimator", "rloo"]


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
    with pytest.raises(SystemExit) as end:
        launch.main([CPU, "--help"])
    assert end.value.code == 0
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


def test_openrlhf_s_own_parser_refuses_what_is_nobody_s(capsys, no_ray):
    with pytest.raises(SystemExit) as end:
        launch.main([*PLAIN, "--train.batchsize", "3"])
    assert end.value.code == 2
    assert "--train.batchsize" in capsys.readouterr().err
    assert not no_ray


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
    assert launch.main([CPU]) == 1
    assert capsys.readouterr().err == f"metronome: error: {own}\n"


def test_an_error_that_isn_t_ours_goes_through(monkeypatch):
    def run(*_):
        raise ray.exceptions.RayTaskError("train", "a long traceback", KeyError("x")).as_instanceof_cause()

    monkeypatch.setattr(launch, "run", run)
    with pytest.raises(KeyError):
        launch.main([CPU])


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
