"""A reward model's judgement, chunk by chunk: OpenRLHF's own worker and maker give what they give for a whole batch."""

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need OpenRLHF (requirements/openrlhf.txt)")

import openrlhf_room  # noqa: F401  # before the imports below

# isort: split

import local_ray
import openrlhf_controller
import torch
import workers
from openrlhf.trainer.ray import launcher
from openrlhf.utils import get_strategy
from openrlhf_controller import Engine, Group, build

REWARD = launcher.RewardModelActor.__ray_metadata__.modified_class
MODES = {
    "periodic": {"rollout_source": "periodic"},
    "periodic, shared prompts": {"rollout_source": "periodic", "attention": "shared_prompt"},
    "synchronous": {"loss": "ppo"},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    openrlhf_controller.install(monkeypatch.setattr)
    monkeypatch.setattr(local_ray, "together", 1)
    local_ray.order.seed(0)
    return tmp_path


class Judge(REWARD):
    """OpenRLHF's reward worker, its head drawn here; notes how many rows it gets at once."""

    def __init__(self, args, model):
        self.init_model_from_pretrained(get_strategy(args), str(model))
        with torch.no_grad():
            self.model.score.weight.normal_(generator=torch.Generator().manual_seed(3))
        self.rows = []

    def forward(self, sequences, **named):
        self.rows.append(len(sequences))
        return super().forward(sequences, **named)


def judged(folder, block, **flags):
    """A controller whose engine scores nothing and whose rewards are a model's."""
    engine = Engine()
    answer = engine.response
    engine.response = lambda *given: {**answer(*given), "reward": None, "scores": None}
    flags = {"reward__model_name_or_path": "m", "rollout__micro_batch_size": 4, **flags}
    made = build(folder, block, engines=[engine], **flags)
    made.judge = Judge(made.args, folder / "model")
    made.experience_maker.reward_model_group = Group([made.judge])
    return made


def rewards_of(made):
    """Notes the rewards and advantages that the maker leaves, by a row's tokens."""
    found = {}
    own = made.experience_maker.compute_advantages_and_returns

    def noted(experiences):
        experiences = own(experiences)
        for one in experiences:
            for place, tokens in enumerate(one.sequences):
                row = tuple(tokens[one.attention_mask[place].bool()].tolist())
                advantages = one.advantages[place][one.action_mask[place].bool()]
                found[row] = float(one.rewards[place]), float(advantages[0])
        return experiences

    made.experience_maker.compute_advantages_and_returns = noted
    return found


@pytest.mark.parametrize("together", [1, 3])
@pytest.mark.parametrize("mode", ["periodic", "periodic, shared prompts"])
def test_rewards_advantages_and_the_step_of_chunks_are_those_of_the_whole_batch(folder, monkeypatch, mode, together):
    monkeypatch.setattr(local_ray, "together", together)
    flags = {"data__max_samples": 4, "train__micro_batch_size": 4}
    stock = judged(folder, None, **flags)
    theirs = rewards_of(stock)
    stock.fit()
    made = judged(folder, MODES[mode], **flags)
    ours = rewards_of(made)
    made.fit()
    assert made.logs[0].status["metronome/periodic/parts"] == (4 if together == 1 else 2)
    assert ours.keys() == theirs.keys()
    assert len(ours) == 16
    assert len({round(reward, 4) for reward, _ in ours.values()}) > 10
    for row, (reward, advantage) in ours.items():
        assert reward == pytest.approx(theirs[row][0], abs=1e-5)
        assert advantage == pytest.approx(theirs[row][1], abs=1e-4)
    difference = workers.moments(made.worker) - workers.moments(stock.worker)
    assert float(difference.norm() / workers.moments(stock.worker).norm()) < 1e-5
    for name in ("reward", "rollout/reward_mean", "rollout/reward_std", "return"):
        assert made.logs[0].status[name] == pytest.approx(stock.logs[0].status[name], abs=1e-4)


def test_another_head_gives_another_step(folder):
    stock = judged(folder, None, data__max_samples=4)
    stock.fit()
    made = judged(folder, MODES["periodic"], data__max_samples=4)
    with torch.no_grad():
        made.judge.model.score.weight.normal_(generator=torch.Generator().manual_seed(4))
    made.fit()
    difference = workers.moments(made.worker) - workers.moments(stock.worker)
    assert float(difference.norm() / workers.moments(stock.worker).norm()) > 0.01


@pytest.mark.parametrize("mode", MODES)
def test_each_row_is_judged_once(folder, mode):
    made = judged(folder, MODES[mode], train__micro_batch_size=4)
    made.fit()
    assert sum(made.judge.rows) == 64
    assert all(one.status["metronome/weights/changed"] for one in made.logs)


def test_openrlhfs_filter_reads_scores_of_rollouts_and_a_reward_model_gives_none(folder):
    """As in OpenRLHF: nothing is filtered where no rollout has a score."""
    filtered = {"algo__dynamic_filtering_enable": True, "algo__dynamic_filtering_range": (0.4, 0.6)}
    for block in (None, MODES["periodic"]):
        made = judged(folder, block, **filtered)
        made.fit()
        assert [one.status["dynamic_filtering_pass_rate"] for one in made.logs] == [400.0] * 4
        assert len(made.engines[0].served) == 16
