"""What vllm-ascend needs is checked at the start: against a stand-in of its installation, on verl's own configuration.

A fake distribution takes the place of the wheel, and a simulated platform that of the card.
"""

import json

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")

from test_config import POOL, composed
from verl.plugin.platform import platform_manager
from verl.plugin.platform.platform_npu import PlatformNPU
from verl.workers.config import RolloutConfig

from metronome.errors import ConfigurationError
from metronome_verl import ascend, config
from metronome_verl.config import arrange

ENGINE = "actor_rollout_ref.rollout.engine_kwargs.vllm"
SEPARATE = ["+metronome.rollout_source=periodic", *POOL, "actor_rollout_ref.rollout.name=vllm", "trainer.device=npu"]


class SimulatedNPU(PlatformNPU):
    """verl's platform for NPUs, seen where there is none."""

    def is_platform_available(self, use_smi_check=False):
        return True


@pytest.fixture
def npu(monkeypatch):
    monkeypatch.setattr(platform_manager, "_current_platform", SimulatedNPU())
    monkeypatch.delenv("VERL_PLATFORM")
    monkeypatch.delenv("VLLM_ASCEND_ENABLE_NZ", raising=False)


@pytest.fixture
def installed(npu, monkeypatch, tmp_path):
    """Gives vllm-ascend a version, by the metadata that a wheel leaves."""

    def install(version):
        folder = tmp_path / f"vllm_ascend-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: vllm_ascend\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def arranged(*overrides):
    made = composed(*SEPARATE, *overrides)
    return made, arrange(made)


def additional(made):
    return json.loads(made.actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config)


@pytest.mark.parametrize("version", ["0.23.0", "0.23.0.post1", "0.23.0+cann9.1"])
def test_the_known_release_passes_and_fractal_nz_is_switched_off_in_every_server(installed, version):
    installed(version)
    made, found = arranged()
    assert made.actor_rollout_ref.rollout.custom.metronome.device == "npu"
    assert made.actor_rollout_ref.hybrid_engine is False
    assert additional(made) == {"weight_nz_mode": 0}
    assert any("FRACTAL_NZ" in note for note in found.notes)
    again = arrange(made)
    assert not any("FRACTAL_NZ" in note for note in again.notes)


def test_servers_get_the_setting_as_json(installed):
    from omegaconf import OmegaConf
    from verl.utils.config import omega_conf_to_dataclass

    installed("0.23.0")
    made, _ = arranged(f"+{ENGINE}.additional_config={{refresh:true}}")
    rollout = omega_conf_to_dataclass(made.actor_rollout_ref.rollout)
    assert isinstance(rollout, RolloutConfig)
    told = {key: value for key, value in rollout.engine_kwargs["vllm"].items() if value is not None}
    assert json.loads(str(told["additional_config"])) == {"refresh": True, "weight_nz_mode": 0}
    assert OmegaConf.select(made, f"{ENGINE}.additional_config")


@pytest.mark.parametrize("version", ["0.22.1", "0.23.0rc1", "0.24.0", "of a fork"])
def test_another_release_is_refused(installed, version):
    installed(version)
    with pytest.raises(ConfigurationError, match=r"vllm-ascend==0\.23\.0") as caught:
        arranged()
    assert version in caught.value.found or "not installed" in caught.value.found


def test_an_environment_without_vllm_ascend_is_refused(npu):
    with pytest.raises(ConfigurationError, match="not installed"):
        arranged()


@pytest.mark.parametrize("backend", ["hccl", "nixl", "mooncake"])
def test_a_transport_that_is_not_hccl_is_refused(installed, backend):
    installed("0.23.0")
    with pytest.raises(ConfigurationError, match=r"backend=nccl") as caught:
        arranged(f"actor_rollout_ref.rollout.checkpoint_engine.backend={backend}")
    assert caught.value.found == backend
    assert "HCCL" in caught.value.what


def test_a_transport_of_ones_own_is_taken_and_said_to_be_unknown(installed):
    installed("0.23.0")
    own = "actor_rollout_ref.rollout.checkpoint_engine"
    _, found = arranged(f"{own}.backend=mine", f"{own}.custom_backend_module=json")
    assert any("not known to metronome" in note for note in found.notes)


def test_fractal_nz_in_the_environment_is_refused_and_a_setting_goes_before_it(installed, monkeypatch):
    installed("0.23.0")
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", "1")
    with pytest.raises(ConfigurationError, match="FRACTAL_NZ") as caught:
        arranged()
    assert (caught.value.found, caught.value.where) == ("VLLM_ASCEND_ENABLE_NZ=1", "environment")
    arranged(f"+{ENGINE}.additional_config.weight_nz_mode=0")  # as vllm-ascend decides between the two
    monkeypatch.setenv("VLLM_ASCEND_ENABLE_NZ", "0")
    made, _ = arranged()
    assert additional(made) == {"weight_nz_mode": 0}


@pytest.mark.parametrize(
    "override",
    [
        f"+{ENGINE}.additional_config.weight_nz_mode=2",
        f"+{ENGINE}.additional_config='{{\"weight_nz_mode\":2}}'",
        f"+{ENGINE}.additional-config.weight_nz_mode=2",
        "+ray_kwargs.ray_init.runtime_env.env_vars.VLLM_ASCEND_ENABLE_NZ=2",
    ],
)
def test_fractal_nz_in_the_configuration_is_refused(installed, override):
    installed("0.23.0")
    with pytest.raises(ConfigurationError, match=r"=2.*weight_nz_mode=0"):
        arranged(override)


def test_an_additional_configuration_that_cannot_be_read_is_refused(installed):
    installed("0.23.0")
    with pytest.raises(ConfigurationError, match="mapping or JSON"):
        arranged(f"+{ENGINE}.additional_config=nz")


def test_devices_shared_in_a_mode_that_needs_its_own_are_refused(installed):
    installed("0.23.0")
    made = composed(*SEPARATE)
    with pytest.raises(ConfigurationError, match="hybrid_engine=False"):
        ascend.check_ascend(made, "bounded", "npu", [])
    notes = []
    ascend.check_ascend(made, "synchronous", "npu", notes)
    assert any("shares the NPUs" in note for note in notes)


def test_this_verl_sleeps_at_level_one_on_npus_and_another_is_refused(installed, monkeypatch):
    installed("0.23.0")
    source = ascend._server_source()
    assert ascend._source_takes_level_one(source)
    deeper = source.replace(
        "if mtp_rollout_enabled or self.lora_as_adapter or is_torch_npu", "if False and is_torch_npu"
    )
    assert deeper != source
    assert not ascend._source_takes_level_one(deeper)
    assert not ascend._source_takes_level_one("")
    monkeypatch.setattr(ascend, "_server_source", lambda: deeper)
    with pytest.raises(ConfigurationError, match="level 1"):
        arranged()


def test_other_rollouts_and_other_devices_are_not_looked_at(npu):
    arrange(composed(*SEPARATE[:-2], "actor_rollout_ref.rollout.name=sglang", "trainer.device=npu"))
    made = composed(*SEPARATE)
    ascend.check_ascend(made, "periodic", "cuda", [])


def test_the_device_and_its_backend_are_those_of_verls_platform_without_a_device_here(npu):
    made = composed(*SEPARATE)
    device = config.device_of(made)
    assert (device.kind, device.collective) == ("npu", "hccl")


def test_another_backend_of_the_platform_is_taken_over(npu, monkeypatch):
    monkeypatch.setenv("USE_FLAGCX", "1")
    assert config.device_of(composed(*SEPARATE)).collective == "flagcx"


def test_a_device_that_the_platform_does_not_see_is_refused(npu, monkeypatch):
    monkeypatch.setattr(SimulatedNPU, "is_platform_available", lambda self, use_smi_check=False: False)
    with pytest.raises(ConfigurationError, match=r"trainer\.device"):
        config.device_of(composed(*SEPARATE))
