"""Whole runs through ``python -m metronome_openrlhf``: OpenRLHF's own main, Ray, DeepSpeed and vLLM, on a CPU."""

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need OpenRLHF (requirements/openrlhf.txt)")

import openrlhf_room  # noqa: F401  (attaches the CPU room)
import openrlhf_session

from metronome_openrlhf.cpu import assets

CORRECTED = ["--algo.advantage.is_correction_level", "token", "--algo.advantage.is_correction_mode", "clip"]
"""With it vLLM returns log-probs, and OpenRLHF logs how far the trainer's are from them."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return assets.make(tmp_path_factory.mktemp("assets"))


def test_a_stock_run_trains_in_the_cpu_room_and_its_weights_reach_vllm(tiny, tmp_path):
    flags = [*openrlhf_session.stock(tiny, tmp_path), *CORRECTED, "--data.max_samples", "16"]
    found = openrlhf_session.run(["--metronome.cpu", *flags])
    assert found.returncode == 0, found.tail()
    assert [one["step"] for one in found.steps] == [1, 2, 3, 4]
    for one in found.steps:
        assert one["actor_grad_norm"] > 0
        assert one["rollout/num_samples"] == 16
        # bfloat16 in two implementations
        assert abs(one["vllm_kl"]) < 0.01
    # A stale engine would show: the policy has moved further than that.
    assert openrlhf_session.moved(tiny.model, tmp_path / "trained") > 0.05
    # What was set for the room is said, and nothing is compiled.
    assert "metronome: --ds.attn_implementation sdpa" in found.text
    assert "built successfully" not in found.text
    assert "FusedAdam" not in found.text
