"""Two ranks of the actor in periodic mode, whole: OpenRLHF's own main, Ray, DeepSpeed on gloo and vLLM, on a CPU."""

import math
import re

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need OpenRLHF (requirements/openrlhf.txt)")

import openrlhf_room  # noqa: F401  (attaches the CPU room)
import openrlhf_sampled
import openrlhf_session

from metronome_openrlhf.cpu import assets

# Three groups of five: ranks can't have as many rows, and a part of one group leaves a rank short of a micro-batch.
FLAGS = """
--metronome.cpu --metronome.rollout_source periodic --metronome.loss a3po --metronome.attention shared_prompt
--rollout.batch_size 3 --rollout.n_samples_per_prompt 5 --rollout.micro_batch_size 5 --train.micro_batch_size 2
--data.max_samples 6 --algo.kl.init_coef 0.01 --algo.kl.use_loss --algo.kl.estimator k3
"""


def trained(assets, folder, ranks):
    """A run of two steps with ``ranks`` ranks of the actor, and what its engine generated."""
    name = f"ranks{ranks}"
    flags = [*openrlhf_session.stock(assets, folder / name), *openrlhf_sampled.place(assets, name), *FLAGS.split()]
    found = openrlhf_session.run([*flags, "--actor.num_gpus_per_node", str(ranks)])
    assert found.returncode == 0, found.tail()
    assert [one["step"] for one in found.steps] == [1, 2]
    return found, openrlhf_sampled.record(assets, name)


def test_two_ranks_train_a_batch_by_parts_as_one_rank_does(tmp_path):
    tiny = assets.make(tmp_path / "assets")
    (one, alone), (two, together) = (trained(tiny, tmp_path, ranks) for ranks in (1, 2))
    assert [len(set(re.findall(r"\(MetronomePolicy pid=(\d+)", found.text))) for found in (one, two)] == [1, 2]
    for step in two.steps:
        assert step["metronome/periodic/rows"] == step["rollout/num_samples"] == 15
        assert step["metronome/periodic/parts"] > 1
        assert math.isfinite(step["actor_grad_norm"])
        assert step["actor_grad_norm"] > 0
        assert step["metronome/weights/changed"] == step["metronome/weights/finite"] == 1
        assert step["metronome/loss/staleness_max"] == 0
        assert abs(step["metronome/loss/ratio"] - 1) < 0.02
    # The same samples of the first weights, so that one gradient can be compared with the other.
    first, same = ({(sample.prompt, sample.tokens) for sample in made[0]} for made in (alone, together))
    assert first == same
    assert len(first) == 15
    # bfloat16 weights; the order of sums differs.
    norms = [[step["actor_grad_norm"] for step in found.steps] for found in (one, two)]
    assert norms[1][0] == pytest.approx(norms[0][0], rel=2e-3)
    assert one.steps[0]["policy_loss"] == pytest.approx(two.steps[0]["policy_loss"], abs=1e-3)
    assert one.steps[0]["metronome/periodic/tokens"] == two.steps[0]["metronome/periodic/tokens"]
    # Another batch has another gradient.
    assert norms[1][1] != pytest.approx(norms[0][0], rel=0.01)
    # The same tokens were fed, and copies without a trained token, one token each, where a rank was short of rows.
    fed = [found.steps[0]["metronome/attention/tokens_separate"] for found in (one, two)]
    assert fed[0] == sum(len(tokens) for _, tokens in first)
    assert 0 < fed[1] - fed[0] <= two.steps[0]["metronome/loss/calls"] - one.steps[0]["metronome/loss/calls"]
