"""A verl that we don't know is refused: another release, or other arguments; a known one passes."""

import pytest

pytest.importorskip("verl")

from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, PPOTrainer

from metronome.errors import ConfigurationError, VersionMismatch
from metronome_verl import host
from metronome_verl.checks import check_versions
from metronome_verl.trainer import NAME, MetronomeTrainer, register


def test_the_installed_verl_is_the_one_we_know():
    host.check_host()


@pytest.mark.parametrize("found", ["0.8.3", "0.10.0", "1.0.0"])
def test_another_release_is_refused_with_the_one_to_install(found, monkeypatch):
    monkeypatch.setattr(host, "version", lambda name: found)
    with pytest.raises(ConfigurationError, match=r"isn't tested[\s\S]*pip install"):
        host.check_host()


def test_a_method_with_other_arguments_is_refused(monkeypatch):
    def step(self, metrics):
        """Another step."""

    monkeypatch.setattr(PPOTrainer, "step", step)
    with pytest.raises(ConfigurationError, match=r"PPOTrainer\.step isn't the one"):
        host.check_host()


def test_a_method_that_is_gone_is_refused(monkeypatch):
    monkeypatch.delattr(PPOTrainer, "_submit_batch_to_rollout")
    with pytest.raises(ConfigurationError, match="missing"):
        host.check_host()


def test_a_run_with_another_verl_ends_before_anything_of_its_configuration_is_read(monkeypatch):
    monkeypatch.setattr(host, "version", lambda name: "0.10.0")
    with pytest.raises(
        ConfigurationError, match=r"isn't tested.*found '?0\.10\.0.*in trainer\.v1.*to mend: pip install"
    ):
        MetronomeTrainer(None)


def test_the_trainer_is_registered_once_under_its_name():
    register()
    register()
    assert TRAINER_REGISTRY[NAME] is MetronomeTrainer


def test_a_sample_of_another_version_stops_a_period():
    tags = [{"min_global_steps": 3, "max_global_steps": 3}, {"is_padding": True}]
    check_versions(tags, 3, "here")
    for first, last, words in ((2, 3, "another version"), (3, 4, "another version"), (None, None, "doesn't say which")):
        with pytest.raises(VersionMismatch, match=words):
            check_versions([*tags, {"min_global_steps": first, "max_global_steps": last}], 3, "here")
