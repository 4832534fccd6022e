"""Algorithms by OpenRLHF's own flags: the streamed step is its step, each term once; critics in the other modes."""

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need OpenRLHF (requirements/openrlhf.txt)")

import openrlhf_room  # noqa: F401  # before the imports below

# isort: split

import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import local_ray
import openrlhf_async
import openrlhf_controller
import torch
import workers
from openrlhf.trainer.ppo_utils import experience
from openrlhf.trainer.ppo_utils.experience import Experience as experience_of_openrlhf
from openrlhf.trainer.ray import ppo_critic
from openrlhf.utils import get_strategy
from openrlhf_controller import Engine, Group, build

from metronome.errors import ConfigurationError, MetronomeError

PERIODIC = {"rollout_source": "periodic"}
CRITIC = ppo_critic.CriticModelActor.__ray_metadata__.modified_class
TOLERANCE = 2e-6

DAPO = {
    "algo__advantage__estimator": "group_norm",
    "actor__eps_clip_low_high": (0.2, 0.28),
    "algo__dynamic_filtering_enable": True,
    "algo__dynamic_filtering_range": (0.05, 0.95),
    "reward__overlong_buffer_len": 6,
}
ALGORITHMS = {
    "GRPO": {"algo__advantage__estimator": "group_norm"},
    "DAPO": DAPO,
    "Dr.GRPO": {"algo__advantage__estimator": "dr_grpo"},
    "RLOO": {"algo__advantage__estimator": "rloo"},
}
TERMS = {
    "nothing": {},
    "entropy": {"actor__entropy_coef": 0.05},
    **{
        f"{estimator} in the {place}": {
            "algo__kl__init_coef": 0.05,
            "algo__kl__estimator": estimator,
            "algo__kl__use_loss": place == "loss",
        }
        for estimator in ("k1", "k2", "k3")
        for place in ("loss", "reward")
    },
    "k3 in the loss, unbiased": {
        "algo__kl__init_coef": 0.05,
        "algo__kl__estimator": "k3",
        "algo__kl__use_loss": True,
        "algo__kl__unbiased_gradient": True,
        "actor__entropy_coef": 0.05,
    },
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    openrlhf_controller.install(monkeypatch.setattr)
    monkeypatch.setattr(local_ray, "together", 1)
    local_ray.order.seed(0)
    return tmp_path


def engine():
    """Every fourth prompt has answers that are all right, which a dynamic filter takes out."""
    made = Engine()
    drawn = made.score
    made.score = lambda prompt, member: 1.0 if sum(map(ord, prompt)) % 4 == 0 else drawn(prompt, member)
    return made


def step(folder, block, terms, **flags):
    """The controller after one batch."""
    kl = "algo__kl__init_coef" in terms
    flags = {"data__max_samples": 12, **flags, **terms}
    made = build(folder, block, engines=[engine()], kl=kl, **flags)
    train = made.train_step

    def once(samples, number):
        if number:
            raise StopIteration
        return train(samples, number)

    made.train_step = once
    with pytest.raises(StopIteration):
        made.fit()
    return made


def difference(one, other):
    one, other = workers.moments(one.worker), workers.moments(other.worker)
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_step_of_parts_is_openrlhfs_own_and_each_term_is_in_it_once(folder, name, terms):
    expected = step(folder, None, TERMS[terms], **ALGORITHMS[name])
    made = step(folder, PERIODIC, TERMS[terms], **ALGORITHMS[name])
    assert made.logs[0].status["metronome/periodic/parts"] == 4
    assert difference(made, expected) < TOLERANCE
    if name == "DAPO":
        assert made.logs[0].status["dynamic_filtering_pass_rate"] < 400
        assert (
            made.logs[0].status["dynamic_filtering_pass_rate"] == expected.logs[0].status["dynamic_filtering_pass_rate"]
        )
    for flag, value in TERMS[terms].items() if name == "GRPO" else ():
        if flag in ("algo__kl__init_coef", "actor__entropy_coef"):
            for other in (0.0, 2 * value):
                twice = step(folder, PERIODIC, {**TERMS[terms], flag: other}, **ALGORITHMS[name])
                assert difference(twice, expected) > 100 * TOLERANCE


@pytest.mark.parametrize("name", ALGORITHMS)
def test_another_algorithm_gives_another_step(folder, name):
    others = [step(folder, PERIODIC, {}, **flags) for other, flags in ALGORITHMS.items() if other != name]
    made = step(folder, PERIODIC, {}, **ALGORITHMS[name])
    # RLOO's advantages are Dr.GRPO's times G / (G - 1), which the first step shows as a norm.
    assert all(difference(one, made) > 0.01 for one in others)


@pytest.mark.parametrize("estimator", ["gae", "reinforce", "reinforce_baseline", "flash_reinforce"])
def test_an_estimator_over_the_whole_batch_is_refused_in_periodic_mode(estimator):
    workers.arguments({"rollout_source": "bounded"}, algo__advantage__estimator=estimator)
    with pytest.raises(ConfigurationError, match="looks at the whole batch") as found:
        workers.arguments(PERIODIC, algo__advantage__estimator=estimator)
    assert found.value.where == "--algo.advantage.estimator"
    assert found.value.found == estimator


# --- experts --------------------------------------------------------------------------------------------


@pytest.fixture
def experts(folder):
    """Assets whose model routes tokens to experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    made = workers.model(folder)
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        initializer_range=0.2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3MoeForCausalLM(config).save_pretrained(made.model)
    return made.model


@pytest.mark.parametrize("block", [PERIODIC, {**PERIODIC, "attention": "shared_prompt"}])
def test_parts_of_a_model_with_experts_give_openrlhfs_own_step(experts, block):
    batch = workers.groups((2, 3, 5, 6))
    stock = workers.stock(workers.arguments(), experts)
    workers.whole_step(stock, batch)
    assert stock.actor.model.module.config.output_router_logits
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        worker = workers.policy(workers.arguments(block), experts)
        for place in order:
            worker.metronome_accumulate([workers.together(batch[place])], 16, 0.0)
        worker.metronome_step(16)
        ours, theirs = workers.moments(worker), workers.moments(stock)
        assert float((ours - theirs).norm() / theirs.norm()) < TOLERANCE


def test_router_losses_would_depend_on_the_cut_and_openrlhf_has_no_routing_replay():
    workers.arguments({"loss": "ppo"}, actor__aux_loss_coef=0.01)
    for block in (PERIODIC, {"attention": "shared_prompt"}):
        with pytest.raises(ConfigurationError, match="router balance losses") as found:
            workers.arguments(block, actor__aux_loss_coef=0.01)
        assert found.value.where == "--actor.aux_loss_coef"
    offered = Path(find_spec("openrlhf.cli.train_ppo_ray").origin).read_text()
    assert "--actor.aux_loss_coef" in offered
    assert not re.search(r"--[\w.]*(routing|routed|replay)", offered)


def test_the_cpu_room_refuses_experts_whose_weights_vllm_packs():
    from metronome_openrlhf.cpu.worker import CpuWorker

    worker, model = CpuWorker(), torch.nn.Module()
    model.routed_experts = torch.nn.Module()
    model.routed_experts.w13_weight = torch.nn.Parameter(torch.zeros(2, 4, 4))
    worker.model_runner = SimpleNamespace(model=model)
    with pytest.raises(ConfigurationError, match="no model with experts") as found:
        worker.init_process_group("127.0.0.1", 1, 1, 2, "weights")
    assert found.value.found == "routed_experts.w13_weight"


# --- critics --------------------------------------------------------------------------------------------


class Critic(CRITIC):
    """OpenRLHF's critic, in whose process rows have OpenRLHF's own fields."""

    def __init__(self, args, model):
        args.critic.model_name_or_path = args.actor.model_name_or_path = str(model)
        self.init_model_from_pretrained(get_strategy(args), str(model), 100)
        with torch.no_grad():
            self.critic.module.score.weight.normal_(std=0.1, generator=torch.Generator().manual_seed(5))
        self.appended = 0

    def append(self, experience):
        self.appended += len(experience.sequences)
        self._own(super().append, experience)

    def fit(self):
        return self._own(super().fit)

    @staticmethod
    def _own(method, *arguments):
        kept, experience.Experience = experience.Experience, experience_of_openrlhf
        try:
            return method(*arguments)
        finally:
            experience.Experience = kept

    @property
    def head(self):
        return self.critic.module.score.weight.detach().clone()


def with_critic(trainer, args, model):
    critic = Critic(args, model)
    trainer.critic_model_group = trainer.experience_maker.critic_model_group = Group([critic])
    return critic


GAE = {"algo__advantage__estimator": "gae", "algo__advantage__lambd": 0.95, "critic__adam__lr": 1e-3}


def test_a_critic_in_synchronous_mode_takes_openrlhfs_own_steps(folder):
    runs = []
    for block in (None, {"attention": "shared_prompt"}):
        made = build(folder, block, train__micro_batch_size=4, **GAE)
        critic = with_critic(made, made.args, folder / "model")
        before = critic.head
        made.fit()
        assert not torch.equal(critic.head, before)
        assert critic.appended == 64
        runs.append([one.status for one in made.logs])
    for number, (theirs, ours) in enumerate(zip(*runs, strict=True)):
        for name in ("actor_grad_norm", "critic_loss", "critic_grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4 if not number else 5e-3), (number, name)
        assert ours["critic_grad_norm"] > 0
        assert ours["metronome/attention/calls"] > 0


@pytest.fixture
def threads(tmp_path, monkeypatch):
    openrlhf_async.install(monkeypatch.setattr)
    yield tmp_path
    openrlhf_async.stop()


def bounded(threads, block, **flags):
    made = openrlhf_async.build(threads, {"bounded": {"max_staleness": 2}, **block}, data__max_samples=16, **flags)
    made.steps = made.learner.logs
    return made


@pytest.mark.parametrize("block", [{}, {"loss": "a3po"}, {"loss": "a3po", "attention": "shared_prompt"}])
def test_a_critic_learns_in_bounded_mode(threads, block):
    made = bounded(threads, block, train__micro_batch_size=4, **GAE)
    critic = with_critic(made.learner, made.learner.args, threads / "model")
    before = critic.head
    made.fit()
    assert critic.appended == 64
    assert not torch.equal(critic.head, before)
    assert [one.status["metronome/bounded/staleness_max"] for one in made.steps] == [0, 1, 2, 2]
    for one in made.steps:
        assert one.status["critic_loss"] > 0
        assert one.status["critic_grad_norm"] > 0
        assert one.status["actor_grad_norm"] > 0
        assert one.status["metronome/weights/changed"] == 1
        assert bool(one.status.get("metronome/loss/calls")) is ("loss" in block)


def test_while_a_critic_warms_up_engines_keep_their_weights_and_count_their_versions(threads):
    made = bounded(threads, {"loss": "a3po"}, critic__freezing_steps=1, **GAE)
    weights = []
    own = made.engines[0].set_version
    made.engines[0].set_version = lambda version: (weights.append(made.engines[0].weights), own(version))
    with_critic(made.learner, made.learner.args, threads / "model")
    made.fit()
    assert ["actor_grad_norm" in one.status for one in made.steps] == [False, False, True, True]
    assert len(set(weights)) == 3
    assert weights[0] == weights[1]
    assert made.engines[0].versions == [1, 2, 3, 4]


@pytest.mark.parametrize("estimator", ["reinforce", "reinforce_baseline", "flash_reinforce", "rloo", "dr_grpo"])
def test_every_estimator_learns_in_bounded_mode(threads, estimator):
    made = bounded(threads, {"loss": "a3po"}, algo__advantage__estimator=estimator)
    made.fit()
    assert len(made.steps) == 4
    assert all(one.status["actor_grad_norm"] > 0 for one in made.steps)


# --- several engines ------------------------------------------------------------------------------------

PUBLICATIONS = {
    "finish": ["set_version {}"],
    "resume": ["pause", "set_version {}", "resume"],
    "abort": ["pause", "set_version {}", "abort", "resume"],
}


@pytest.mark.parametrize("in_flight", PUBLICATIONS)
def test_a_publication_reaches_every_engine_before_any_goes_on(threads, in_flight):
    made = bounded(threads, {"in_flight": in_flight}, engines=3)
    made.fit()
    expected = [line.format(version) for version in (1, 2, 3, 4) for line in PUBLICATIONS[in_flight] for _ in range(3)]
    assert made.log == expected
    assert [one.versions for one in made.engines] == [[1, 2, 3, 4]] * 3
    assert len({one.weights for one in made.engines}) == 1
    assert all(one.served for one in made.engines)
    assert [one.status["metronome/bounded/staleness_max"] for one in made.steps] == [0, 1, 2, 2]


@pytest.mark.parametrize("deaf", [0, 1, 2])
def test_one_engine_that_the_weights_dont_reach_stops_the_run_and_the_others_go_on(threads, deaf):
    made = bounded(threads, {"in_flight": "resume"}, engines=3)
    made.engines[deaf].deaf = True
    with pytest.raises(MetronomeError, match=rf"engines \[{deaf}\] of 3"):
        made.fit()
    assert made.log[-3:] == ["resume"] * 3
