"""A periodic run with a group controller that is stopped and goes on: OpenRLHF's own main, Ray, DeepSpeed and vLLM."""

import re
import shutil
from collections import Counter

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need OpenRLHF (requirements/openrlhf.txt)")

import openrlhf_room  # noqa: F401  (attaches the CPU room)
import openrlhf_sampled
import openrlhf_session

from metronome_openrlhf.cpu import assets

SAVED, STEPS = 3, 5
FLAGS = """
--metronome.cpu --metronome.rollout_source periodic --metronome.loss a3po
--metronome.group_controller sagc --metronome.sagc.start 4 --metronome.sagc.min_dwell 1
--metronome.sagc.budget fixed_prompts --metronome.sagc.lambda_start 8
--metronome.sagc.event step_idle --metronome.sagc.idle_tau 0.05 --data.max_samples 20
"""
SIZES = ["--metronome.sagc.sizes", "[2,4]"]
RESUME = ["--ckpt.load_enable"]


def ran(tiny, folder, name, *flags):
    """A run whose agent's record is ``name``'s; all of them keep their checkpoints in one place."""
    own = [*openrlhf_session.stock(tiny, folder), *openrlhf_sampled.place(tiny, name), *FLAGS.split()]
    return openrlhf_session.run([*own, "--ckpt.save_steps", str(SAVED), *flags])


def decisions(found):
    """What the controller says after each step; its sampler's numbers are in it."""
    return re.findall(r"metronome: (G \d+ (?:kept|-> \d+) at step \d+: .*)", found.text)


def served(tiny, name):
    """Version -> how often each prompt was answered."""
    return {
        version: Counter(sample.prompt for sample in samples)
        for version, samples in openrlhf_sampled.record(tiny, name).items()
    }


def answers(samples):
    return {(sample.prompt, sample.tokens) for sample in samples}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Assets, folder and output of a run of five steps, of which the third left a checkpoint."""
    folder = tmp_path_factory.mktemp("whole")
    tiny = assets.make(folder / "assets")
    found = ran(tiny, folder, "whole", *SIZES)
    assert found.returncode == 0, found.tail()
    assert [one["step"] for one in found.steps] == list(range(1, STEPS + 1))
    return tiny, folder, found


def test_a_run_goes_on_behind_its_checkpoint_as_if_it_had_not_stopped(whole, tmp_path):
    tiny, folder, before = whole
    shutil.copytree(folder / "checkpoints", tmp_path / "checkpoints")
    after = ran(tiny, tmp_path, "resumed", *SIZES, *RESUME)
    assert after.returncode == 0, after.tail()
    assert [one["step"] for one in after.steps] == [4, 5]
    # The controller, its sampler included
    assert len({one["metronome/group_controller/size"] for one in before.steps}) > 1
    assert len(decisions(before)) == STEPS
    strip = re.compile(r"measured bubble [\d.]+")
    assert [strip.sub("", one) for one in decisions(after)] == [strip.sub("", one) for one in decisions(before)[SAVED:]]
    # Its place in the data, and the versions of the weights
    first, rest = served(tiny, "whole"), served(tiny, "resumed")
    assert list(first) == [0, 1, 2, 3, 4]
    assert rest == {version: first[version] for version in (3, 4)}
    done = set().union(*(first[version] for version in range(SAVED)))
    assert len(done) == 4 * SAVED
    assert not done & set().union(*rest.values())
    for one, other in zip(after.steps, before.steps[SAVED:], strict=True):
        assert one["rollout/num_samples"] == other["rollout/num_samples"]
        assert one["metronome/loss/staleness_max"] == 0
    # Weights: the same answers and the same gradient of them, and not the next step's
    made, again = openrlhf_sampled.record(tiny, "whole"), openrlhf_sampled.record(tiny, "resumed")
    assert answers(again[SAVED]) == answers(made[SAVED])
    norms = [step["actor_grad_norm"] for step in before.steps[SAVED:]]
    assert after.steps[0]["actor_grad_norm"] == pytest.approx(norms[0], rel=2e-3)
    assert after.steps[0]["actor_grad_norm"] != pytest.approx(norms[1], rel=0.01)
    # The optimiser's state: both steps move the weights as they did
    assert again[SAVED + 1][0].weights == pytest.approx(made[SAVED + 1][0].weights, abs=0.1)
    assert abs(made[SAVED + 1][0].weights[0] - made[SAVED][0].weights[0]) > 1
    apart = openrlhf_session.moved(folder / "trained", tmp_path / "trained")
    assert apart < 1e-3 < 0.05 < openrlhf_session.moved(tiny.model, folder / "trained")


def test_a_checkpoint_of_other_sizes_is_refused_in_one_line(whole, tmp_path):
    tiny, folder, _ = whole
    shutil.copytree(folder / "checkpoints", tmp_path / "checkpoints")
    found = ran(tiny, tmp_path, "refused", "--metronome.sagc.sizes", "[4,8]", *RESUME)
    lines = [line for line in found.text.splitlines() if line.startswith("metronome: error:")]
    assert found.returncode == 2
    assert len(lines) == 1
    assert "written with other sizes" in lines[0]
    assert not found.steps
