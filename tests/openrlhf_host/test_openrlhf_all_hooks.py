"""All four hooks in one periodic run with a reference model: OpenRLHF's own main, Ray, DeepSpeed and vLLM, on a CPU."""

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need OpenRLHF (requirements/openrlhf.txt)")

import openrlhf_room  # noqa: F401  (attaches the CPU room)
import openrlhf_sampled
import openrlhf_session

from metronome_openrlhf.cpu import assets

OURS = """
--metronome.cpu --metronome.rollout_source periodic --metronome.loss a3po --metronome.attention shared_prompt
--metronome.group_controller sagc --metronome.sagc.sizes [2,4,8] --metronome.sagc.start 4 --metronome.sagc.min_dwell 1
--metronome.sagc.budget fixed_prompts --metronome.sagc.lambda_start 8
--metronome.sagc.event step_idle --metronome.sagc.idle_tau 0.05
"""
KL = ["--algo.kl.init_coef", "0.01", "--algo.kl.use_loss", "--algo.kl.estimator", "k3"]
PROMPTS, STEPS, LAYERS = 4, 6, 2


def test_all_four_hooks_work_in_one_run_with_a_reference_model(tmp_path):
    tiny = assets.make(tmp_path / "assets")
    flags = [*openrlhf_session.stock(tiny, tmp_path), *openrlhf_sampled.place(tiny), *KL]
    flags += ["--data.max_samples", str(PROMPTS * STEPS), "--train.micro_batch_size", "8"]
    found = openrlhf_session.run([*OURS.split(), *flags])
    assert found.returncode == 0, found.tail()
    assert [one["step"] for one in found.steps] == list(range(1, STEPS + 1))
    made = openrlhf_sampled.record(tiny)
    assert list(made) == list(range(STEPS))
    sizes = [one["metronome/group_controller/size"] for one in found.steps]
    assert sizes[0] == 4
    assert len(set(sizes)) > 1
    # The controller's own word after a step is the next step's G.
    assert [one["metronome/group_controller/group_size"] for one in found.steps[:-1]] == sizes[1:]
    for one, size, samples in zip(found.steps, sizes, made.values(), strict=True):
        prompts = [sample.prompt for sample in samples]
        assert len(set(prompts)) == PROMPTS
        assert all(prompts.count(prompt) == size for prompt in prompts)
        assert one["rollout/num_samples"] == one["metronome/periodic/rows"] == PROMPTS * size
        assert one["metronome/periodic/parts"] > 1
        assert one["metronome/loss/calls"] > 0
        assert one["metronome/loss/staleness_max"] == 0
        assert one["metronome/loss/off_behavior"] == one["metronome/loss/version_unknown"] == 0
        assert one["metronome/attention/calls"] == LAYERS * one["metronome/loss/calls"]
        assert one["metronome/attention/tokens_fed"] < one["metronome/attention/tokens_separate"]
        assert one["actor_grad_norm"] > 0
        assert one["metronome/weights/changed"] == one["metronome/weights/finite"] == 1
        # The trainer's policy and the engine's are the same, but for bfloat16 in two implementations.
        assert abs(one["metronome/loss/ratio"] - 1) < 0.02
        assert abs(one["metronome/loss/approx_kl"]) < 0.01
    # One publication a step: while a batch is generated the engine's weights stay, and every batch has others.
    weights = [{one for sample in samples for one in sample.weights} for samples in made.values()]
    assert [len(one) for one in weights] == [1] * STEPS
    assert len(set.union(*weights)) == STEPS
    assert all(sample.versions[0] == sample.versions[1] for samples in made.values() for sample in samples)
    # The reference model is the policy that the run began with.
    assert abs(found.steps[0]["kl"]) < 1e-3
    assert found.steps[-1]["kl"] > 0.01
    # A stale engine would show above: the policy has moved further than that.
    assert openrlhf_session.moved(tiny.model, tmp_path / "trained") > 0.05
