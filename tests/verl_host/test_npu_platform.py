"""verl on a simulated NPU: its own platform layer, engines and NPU patches, with our attach, configuration and engine.

A process of its own, which finds torch_npu and a device ``npu`` (``simulated_npu.py``) and nothing that says CPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("verl")

import harness
import torch

HERE = Path(__file__).resolve().parent

SCRIPT = """
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

torch.set_num_threads(1)
import simulated_npu
from npu_standin import semantics
from npu_standin.cases import upper_left
from npu_standin.install import installed

kernels = {"forward": semantics.forward, "backward": semantics.backward}


def counted(direction):
    def kernel(**named):
        simulated_npu.CALLS.append(f"attention {direction}")
        return kernels[direction](**named)

    return kernel


def main(folder, model):
    import verl
    from verl.trainer.ppo.v1.trainer_base import get_trainer_cls
    from verl.utils import device

    facts = {"attached": "metronome_verl.entry" in sys.modules, "registered": get_trainer_cls("metronome").__name__}
    facts["platform"] = [device.get_device_name(), device.get_nccl_backend(), device.get_resource_name()]

    from metronome_verl import cpu

    cpu.attach = lambda: None  # the harness is made for the CPU room
    import harness

    del os.environ["VERL_PLATFORM"]
    harness.join = lambda: None  # verl makes the process group
    batch, old = torch.load(folder / "given.pt", weights_only=False)
    import test_config

    from metronome_verl.config import arrange, device_of, worker_part

    config = test_config.composed(
        "trainer.device=npu",
        "+metronome.rollout_source=periodic",
        "+metronome.loss=a3po",
        "+metronome.attention=shared_prompt",
        "actor_rollout_ref.rollout.name=vllm",
        *test_config.POOL,
    )
    facts["notes"] = list(arrange(config).notes)
    chosen = device_of(config)
    facts["device"] = [chosen.kind, chosen.collective]
    part = worker_part(config.actor_rollout_ref)

    from metronome.contracts import AttentionNeed
    from metronome.shared_prompt import select

    facts["attention"] = part.attention.explain(AttentionNeed("npu", "bfloat16", 64, 64, 8, 2))
    need = select.tensor_need
    select.tensor_need = lambda *given: replace(need(*given), device="npu")  # the card's memory is the host's
    select.backend_named("npu")._dtypes += ("float32",)  # so that the equality is held to its rounding

    from verl.workers.engine.base import EngineRegistry

    from metronome_verl.engine import building
    from metronome_verl.fsdp_engine import SharedPromptEngine

    for strategy in ("fsdp2", "fsdp"):
        stock = harness.worker(model, strategy=strategy, tinker=True)
        with building(part.attention) as made:
            facts[f"{strategy} engine"] = EngineRegistry.get_engine_cls("language_model", strategy).__name__
            shared = harness.worker(model, strategy=strategy, tinker=True)
        assert made == [shared.engine]
        found = {}
        for name, worker in (("stock", stock), ("shared", shared)):
            simulated_npu.CALLS.clear()
            log_probs, entropies = harness.infer(worker, batch)
            gradients = harness.gradients(worker, batch, old)
            metrics = harness.train(worker, batch, old)
            after, _ = harness.infer(worker, batch)
            found[name] = [log_probs, entropies, gradients, metrics["grad_norm"], metrics["actor/pg_loss"], after]
            facts[f"{strategy} {name} calls"] = {call: simulated_npu.CALLS.count(call) for call in simulated_npu.CALLS}
        facts[f"{strategy} counts"] = vars(shared.engine.drain())
        torch.save(found, folder / f"{strategy}.pt")
    facts["keys"] = sorted(
        backend
        for backend, engines in EngineRegistry._engines["language_model"].items()
        if engines.get(("npu", "metronome")) is SharedPromptEngine
    )
    facts["group"] = torch.distributed.get_backend_config()

    kernels["forward"], kernels["backward"] = upper_left("forward"), upper_left("backward")
    with building(part.attention):
        worker = harness.worker(model)
    try:
        harness.infer(worker, batch)
        facts["a driver that aligns masks otherwise"] = "passed"
    except Exception as error:
        facts["a driver that aligns masks otherwise"] = type(error).__name__
    return facts


with installed("npu", strict_dtypes=False, forward=counted("forward"), backward=counted("backward")) as operators:
    simulated_npu.install(operators)
    print(json.dumps(main(Path(sys.argv[1]), Path(sys.argv[2]))))
"""


@pytest.fixture(scope="module")
def cpu(tmp_path_factory):
    """The model, a batch, and what verl's own engine computes of it on a CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    model = harness.save_model(tmp_path_factory.mktemp("qwen2"))
    batch = harness.Batch(tool=3)
    found = {}
    for strategy in ("fsdp2", "fsdp"):
        stock = harness.worker(model, strategy=strategy, tinker=True)
        log_probs, entropies = harness.infer(stock, batch)
        draw = torch.Generator().manual_seed(3)
        old = [row + 0.3 * torch.randn(len(row), generator=draw) for row in log_probs]
        gradients = harness.gradients(stock, batch, old)
        metrics = harness.train(stock, batch, old)
        after, _ = harness.infer(stock, batch)
        found[strategy] = [log_probs, entropies, gradients, metrics["grad_norm"], metrics["actor/pg_loss"], after]
    torch.set_num_threads(before)
    return model, batch, old, found


@pytest.fixture(scope="module")
def npu(cpu, tmp_path_factory):
    """What the process on the simulated NPU saw, and its figures."""
    folder = tmp_path_factory.mktemp("npu")
    model, batch, old, _ = cpu
    torch.save((batch, old), folder / "given.pt")
    wheel = folder / "vllm_ascend-0.23.0.dist-info"
    wheel.mkdir()
    (wheel / "METADATA").write_text("Metadata-Version: 2.4\nName: vllm_ascend\nVersion: 0.23.0\n")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("VERL_", "VLLM_"))}
    environment |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(harness.free_port()), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent), str(folder)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), str(model)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    figures = {one: torch.load(folder / f"{one}.pt", weights_only=False) for one in ("fsdp2", "fsdp")}
    return facts, figures


def test_verls_platform_layer_names_device_backend_and_ray_resource(npu):
    facts, _ = npu
    assert facts["platform"] == ["npu", "hccl", "NPU"]
    assert facts["device"] == ["npu", "hccl"]
    assert facts["group"] == "cpu:gloo,npu:hccl"


def test_we_attach_and_arrange_there_as_anywhere(npu):
    facts, _ = npu
    assert facts["attached"]
    assert facts["registered"] == "MetronomeTrainer"
    said = "\n".join(facts["notes"])
    for words in ("hybrid_engine=False", "bypass_mode=True", "FRACTAL_NZ"):
        assert words in said


def test_auto_takes_the_npu_backend_for_attention(npu):
    facts, _ = npu
    assert facts["attention"].startswith("npu: one fused TND call")
    for strategy in ("fsdp2", "fsdp"):
        assert "attention forward" not in facts[f"{strategy} stock calls"]
        for direction in ("forward", "backward"):
            assert facts[f"{strategy} shared calls"][f"attention {direction}"] > 0


def test_verls_registry_gives_our_engine_for_npu_and_metronome(npu):
    facts, _ = npu
    assert facts["keys"] == ["fsdp", "fsdp2"]
    for strategy in facts["keys"]:
        assert facts[f"{strategy} engine"] == "SharedPromptEngine"
        counts = facts[f"{strategy} counts"]
        assert counts["passed_through"] == 0
        assert counts["tokens_fed"] < counts["tokens_separate"]


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp"])
@pytest.mark.parametrize("rows", ["stock", "shared"])
def test_log_probs_gradients_and_the_step_are_those_of_a_cpu(cpu, npu, strategy, rows):
    facts, figures = npu
    assert facts[f"{strategy} {rows} calls"]["npu_rms_norm"] > 0  # verl's patches for NPUs are in place
    wanted, found = cpu[3][strategy], figures[strategy][rows]
    for place in (0, 1, 5):  # log-probs, entropies, and log-probs after the step
        assert (torch.cat(found[place]) - torch.cat(wanted[place])).abs().max() < 5e-6
    scale = max(grad.abs().max() for grad in wanted[2].values())
    assert list(found[2]) == list(wanted[2])
    for name, grad in wanted[2].items():
        assert (found[2][name] - grad).abs().max() < 2e-6 * scale, name
    assert found[3] == pytest.approx(wanted[3], rel=2e-6)
    assert found[4] == pytest.approx(wanted[4], abs=2e-6)
    assert (torch.cat(wanted[5]) - torch.cat(wanted[0])).abs().max() > 1e-2  # the step moved the model


def test_a_driver_that_aligns_masks_otherwise_is_caught(npu):
    facts, _ = npu
    assert facts["a driver that aligns masks otherwise"] == "EqualityViolated"
