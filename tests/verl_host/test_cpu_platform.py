"""verl on the platform ``cpu``: what it finds by name, and what we change in it."""

import functools
import json

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")

import torch

import metronome_patches.ledger as ledger
from metronome.errors import PluginError
from metronome_verl import cpu

cpu.attach()

from metronome_verl.cpu.patches import PATCHES, one_gloo  # noqa: E402

# ---- platform and registries ----


def test_verl_takes_the_cpu_as_its_device():
    import verl.workers.engine.fsdp.transformer_impl  # noqa: F401
    from verl.plugin.platform import get_platform
    from verl.utils import device
    from verl.workers.engine.base import EngineRegistry

    assert device.get_device_name() == "cpu"
    assert torch.ones(1).to(device.get_device_id()).device.type == "cpu"
    assert device.get_nccl_backend() == "gloo"
    assert device.get_resource_name() == "GPU"
    assert get_platform().ray_resource_options(1) == {"num_gpus": 1}
    for backend in ("fsdp", "fsdp2"):
        assert EngineRegistry.get_engine_cls("language_model", backend).__name__ == "FSDPEngineWithLMHead"
        assert EngineRegistry.get_engine_cls("value_model", backend).__name__ == "FSDPEngineWithValueHead"


def test_the_device_module_answers_what_verl_asks_and_nothing_else():
    from verl.utils.device import get_torch_device

    module = get_torch_device()
    assert module.is_available()
    assert module.empty_cache() is None
    assert module.synchronize() is None
    free, total = module.mem_get_info()
    assert 0 < free <= total
    held = torch.ones(20_000_000)  # 80 MB
    assert module.memory_allocated() > held.nbytes
    assert module.max_memory_allocated() > held.nbytes
    state = module.get_rng_state()
    first = torch.rand(3)
    module.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    with pytest.raises(AttributeError):
        module.cudnn  # noqa: B018


def test_the_platform_is_never_chosen_by_itself():
    from verl.plugin.platform import get_platform

    assert not get_platform().is_platform_available(use_smi_check=True)


def test_a_room_that_comes_after_another_platform_is_refused(monkeypatch):
    from verl.plugin.platform import platform_manager

    monkeypatch.setattr(platform_manager, "_current_platform", object())
    monkeypatch.setattr(cpu, "_attached", False)
    with pytest.raises(PluginError, match="VERL_PLATFORM=cpu before verl is imported"):
        cpu.attach()


def test_rollout_and_transport_are_found_by_name():
    from verl.checkpoint_engine.base import CheckpointEngineRegistry
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    assert get_rollout_replica_class(cpu.ROLLOUT).__name__ == "HFReplica"
    assert get_rollout_class(cpu.ROLLOUT).__name__ == "ServerAdapter"
    assert CheckpointEngineRegistry.get(cpu.TRANSPORT).__name__ == "RayTransport"


# ---- patches ----


def test_every_patch_tells_why_and_until_when():
    for patch in PATCHES:
        assert min(len(patch.why), len(patch.upstream), len(patch.remove_when)) > 20
        assert ":" in patch.target
    assert len({patch.target for patch in PATCHES}) == len(PATCHES)


def test_patches_are_applied_once(monkeypatch):
    import verl.trainer.ppo.v1.trainer_separate_async as trainer
    import verl.workers.rollout.base  # noqa: F401

    assert set(ledger.applied()) >= {patch.target for patch in PATCHES}
    before = torch.distributed.init_process_group, trainer.logger
    monkeypatch.setattr(cpu, "_attached", False)
    cpu.attach()
    for patch in PATCHES:
        ledger.apply(patch)
    assert (torch.distributed.init_process_group, trainer.logger) == before
    assert torch.distributed.init_process_group.__wrapped__.__module__ == "torch.distributed.distributed_c10d"


def test_a_patch_under_another_wrapper_is_not_applied_again(monkeypatch):
    ours = torch.distributed.init_process_group
    outer = functools.wraps(ours)(lambda *args, **named: ours(*args, **named))
    monkeypatch.setattr(torch.distributed, "init_process_group", outer)
    ledger.apply(PATCHES[0])
    assert torch.distributed.init_process_group is outer


def test_the_backend_that_verl_composes_reaches_torch_as_one_gloo():
    asked = []
    wrapped = one_gloo(lambda backend, **named: asked.append((backend, named)))
    wrapped(backend="cpu:gloo,cpu:gloo", rank=0)
    wrapped("cpu:gloo,cuda:nccl")
    assert asked == [("cpu:gloo", {"rank": 0}), ("cpu:gloo,cuda:nccl", {})]


def test_the_logger_of_separate_async_takes_flush(caplog):
    import verl.trainer.ppo.v1.trainer_separate_async as trainer

    with caplog.at_level("INFO", logger=trainer.logger.name):
        trainer.logger.info("hybrid replicas %s", "disabled", flush=True)
        trainer.logger.warning("plain")
    assert [record.getMessage() for record in caplog.records] == ["hybrid replicas disabled", "plain"]
    with pytest.raises(TypeError):
        trainer.logger.logger.info("the bug that it hides", flush=True)


@pytest.mark.parametrize("version", ["0.8.0", "0.10.0", "1.0"])
def test_another_version_of_verl_is_refused(monkeypatch, version):
    monkeypatch.setattr(ledger, "version", lambda name: version)
    monkeypatch.setattr(cpu, "_attached", False)
    for call in (cpu.attach, lambda: ledger.apply(PATCHES[0])):
        with pytest.raises(PluginError, match=rf">=0.9,<0.10; found '{version}'.*pip install"):
            call()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expects": ("text", "strict")}, "found 'parameters s,"),
        ({"expects": dict}, "found 'a function'"),
        ({"target": "json:burst"}, "nothing of that name"),
        ({"host_versions": "<0.9"}, "written for verl <0.9"),
    ],
)
def test_a_target_of_another_shape_is_refused(changes, message):
    made = {
        "host": "verl",
        "target": "json:loads",
        "host_versions": ">=0.9",
        "expects": ("s",),
        "why": "a test",
        "upstream": "none",
        "remove_when": "never",
        "replace": lambda found: None,
    }
    before = json.loads
    with pytest.raises(PluginError, match=message):
        ledger.apply(ledger.Patch(**(made | changes)))
    assert json.loads is before
