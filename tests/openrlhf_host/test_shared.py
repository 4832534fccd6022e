"""Shared prompts in OpenRLHF's real actor, DeepSpeed engine and replay buffer: its own separate rows give the same."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need openrlhf (requirements/openrlhf.txt)")

import shared_two_ranks
import torch
import workers
from openrlhf.models import Actor
from openrlhf.trainer.ray import launcher
from openrlhf.utils import get_strategy

from metronome.errors import ConfigurationError, EqualityViolated, MetronomeError
from metronome.shared_prompt.plan import SharedPromptPlan
from metronome.shared_prompt.select import SharedPromptAttention
from metronome_openrlhf.config import arrange, part_of
from metronome_openrlhf.reference import MetronomeReference
from metronome_openrlhf.shared import sharing_actor

BLOCK = {"attention": "shared_prompt"}
UNEQUAL = (4, 1, 3, 2)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return workers.model(tmp_path_factory.mktemp("assets")).model


@pytest.fixture(scope="module")
def part():
    return part_of(workers.arguments(BLOCK, train__micro_batch_size=4))


@pytest.fixture
def eager():
    """OpenRLHF compiles its entropy, which takes a C++ compiler and a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


def pair(part, model, dtype="fp32", cls=None, **options):
    """OpenRLHF's actor and ours with the same weights."""
    options = {"attn_implementation": "eager", "param_dtype": dtype, "temperature": 0.7, **options}
    torch.manual_seed(1)
    one = Actor(str(model), **options)
    torch.manual_seed(1)
    other = (cls or sharing_actor(part))(str(model), **options)
    other.load_state_dict(one.state_dict())
    return one, other


def rows(sizes=UNEQUAL, seed=0):
    """A micro-batch of several groups in disorder, an answer of several turns and a row without a trained token."""
    generator = torch.Generator().manual_seed(seed)
    found = [row for group in workers.groups(sizes, seed) for row in group]
    turns, masked = workers.copied([found[0], found[1]])
    first = int(turns.action_mask[0].argmax())
    turns.action_mask = turns.action_mask.clone()
    turns.action_mask[0, first + 3 : first + 6] = 0  # a tool's tokens
    turns.action_mask[0, -1] = 0  # and one that nothing follows
    masked.action_mask = torch.zeros_like(masked.action_mask)
    found += [turns, masked]
    order = torch.randperm(len(found), generator=generator).tolist()
    return workers.together([found[place] for place in order])


def gradient(actor):
    return torch.cat([one.grad.flatten() for one in actor.model.parameters() if one.grad is not None])


def outcome(actor, batch, weights, entropy=True):
    actor.model.zero_grad()
    log_probs, output = actor(
        batch.sequences, batch.action_mask, batch.attention_mask, return_output=True, return_entropy=entropy
    )
    loss = (log_probs * weights[0]).sum()
    entropies = output.entropy[:, -batch.action_mask.shape[1] :] * batch.action_mask if entropy else None
    if entropy:
        loss = loss + (entropies * weights[1]).sum()
    loss.backward()
    return log_probs.detach(), entropies.detach() if entropy else None, gradient(actor)


def same(one, other, tolerance=1e-5):
    return all(
        float((a - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max()))
        for a, b in zip(one, other, strict=True)
        if b is not None
    )


def drawn(batch):
    return torch.randn(2, *batch.action_mask.shape, generator=torch.Generator().manual_seed(5))


# --- the actor --------------------------------------------------------------------------------------


def test_log_probs_entropies_and_gradients_are_those_of_separate_rows(part, model, eager):
    stock, shared = pair(part, model)
    batch = rows()
    wanted, found = outcome(stock, batch, drawn(batch)), outcome(shared, batch, drawn(batch))
    assert float((found[0] - wanted[0]).abs().max()) < 1e-5
    assert same(found, wanted)
    assert isinstance(shared, Actor)
    counts = shared.drain()
    assert counts["metronome/attention/calls"] == 2  # layers
    assert counts["metronome/attention/tokens_fed"] < 0.8 * int(batch.attention_mask.sum())
    assert counts["metronome/attention/tokens_separate"] > counts["metronome/attention/tokens_fed"]
    assert set(shared.drain().values()) == {0.0}


def test_without_a_gradient_and_an_output_the_log_probs_are_the_same(part, model):
    stock, shared = pair(part, model)
    batch = rows(seed=1)
    with torch.no_grad():
        wanted = stock(batch.sequences, batch.action_mask, attention_mask=batch.attention_mask)
        found = shared(batch.sequences, batch.action_mask, attention_mask=batch.attention_mask)
    assert same([found], [wanted])
    assert found.dtype == wanted.dtype


def _running(build):
    def plan(*arguments, **named):
        made = build(*arguments, **named)
        made.position_ids.copy_(torch.arange(made.tokens))
        return made

    return plan


class Causal(SharedPromptAttention):
    """Sees the whole row before a token, its siblings included."""

    def attend(self, q, k, v, plan, scale, *, window=None, sinks=None):
        return super().attend(q, k, v, SharedPromptPlan.build([(plan.tokens, [0])]), scale)


@pytest.mark.parametrize("wrong", ["positions that run on", "no mask between siblings", "no temperature"])
def test_a_layout_that_is_wrong_gives_others(part, model, monkeypatch, eager, wrong):
    stock, shared = pair(part, model)
    shared._checked = True
    if wrong == "positions that run on":
        monkeypatch.setattr(SharedPromptPlan, "build", _running(SharedPromptPlan.build))
    elif wrong == "no temperature":
        shared.temperature = 1.0
    else:
        shared.attention = Causal()
    batch = rows()
    wanted, found = outcome(stock, batch, drawn(batch)), outcome(shared, batch, drawn(batch))
    assert not same(found[:1], wanted[:1], 1e-2)
    assert not same(found[2:], wanted[2:], 1e-2)


def test_the_first_use_stops_a_wrong_layout(part, model, monkeypatch):
    _, shared = pair(part, model)
    batch = rows()
    shared.attention = Causal()
    with pytest.raises(EqualityViolated, match="isn't shared-prompt attention"):
        shared(batch.sequences, batch.action_mask, batch.attention_mask)
    shared.attention = part.selection.attention
    monkeypatch.setattr(SharedPromptPlan, "build", _running(SharedPromptPlan.build))
    with pytest.raises(EqualityViolated, match="separate rows"):
        shared(batch.sequences, batch.action_mask, batch.attention_mask)


def test_the_first_use_waits_for_a_group_and_happens_once(part, model, monkeypatch):
    _, shared = pair(part, model)
    seen = []
    monkeypatch.setattr(type(shared), "_compare", lambda self, *_: seen.append(1))
    apart = workers.together([row for group in workers.groups((1, 1)) for row in group])
    for batch, checks in ((apart, 0), (rows(), 1), (rows(seed=1), 1)):
        shared(batch.sequences, batch.action_mask, batch.attention_mask)
        assert len(seen) == checks


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_nothing(part, model, eager, reentrant):
    stock, shared = pair(part, model)
    for actor in (stock, shared):
        actor.gradient_checkpointing_enable({"use_reentrant": reentrant})
        actor.model.enable_input_require_grads()
        actor.train()
    batch = rows()
    assert same(outcome(shared, batch, drawn(batch)), outcome(stock, batch, drawn(batch)))


def test_lora_trains_the_same_adapters(part, model, eager):
    stock, shared = pair(part, model, lora_rank=4, lora_alpha=8, target_modules="all-linear")
    with torch.no_grad():
        for actor in (stock, shared):
            generator = torch.Generator().manual_seed(2)
            for name, one in actor.model.named_parameters():
                if "lora_B" in name:
                    one.copy_(0.1 * torch.randn(one.shape, generator=generator))
    batch = rows()
    wanted, found = outcome(stock, batch, drawn(batch)), outcome(shared, batch, drawn(batch))
    assert same(found, wanted)
    trained = [name for name, one in shared.model.named_parameters() if one.grad is not None]
    assert trained
    assert all("lora_" in name for name in trained)


def test_bfloat16_differs_no_more_than_its_rounding_does(part, model, eager):
    """OpenRLHF's dtype: within what separate rows in bfloat16 are off from fp32, times two."""
    exact, _ = pair(part, model)
    stock, shared = pair(part, model, "bf16")
    batch = rows()
    weights = drawn(batch)
    truth = outcome(exact, batch, weights)
    wanted, found = outcome(stock, batch, weights), outcome(shared, batch, weights)
    off = float((wanted[0] - truth[0]).abs().max())
    assert 1e-4 < off < 0.1
    assert float((found[0] - wanted[0]).abs().max()) < 2 * off
    rounding = float((wanted[2].float() - truth[2]).norm() / truth[2].norm())
    assert float((found[2].float() - truth[2]).norm() / truth[2].norm()) < 2 * rounding
    assert rounding < 0.03


def test_a_group_cut_in_two_adds_up_to_the_whole(part, model, eager):
    _, shared = pair(part, model)
    group = workers.groups((4,))[0]
    whole = workers.together(group)
    weights = drawn(whole)
    wanted = outcome(shared, whole, weights)[2]
    halves = 0
    for at in (0, 2):
        half = workers.together(group[at : at + 2])
        width = half.action_mask.shape[1]
        halves = halves + outcome(shared, half, weights[:, at : at + 2, :width])[2]
    assert same([halves], [wanted])


def test_a_micro_batch_without_a_trained_token_gives_zeros_and_a_gradient_of_zero(part, model, eager):
    _, shared = pair(part, model)
    batch = rows()
    batch.action_mask = torch.zeros_like(batch.action_mask)
    found = outcome(shared, batch, drawn(batch))
    assert all(float(one.abs().max()) == 0 for one in found)
    assert len(found[2]) == sum(one.numel() for one in shared.model.parameters())
    assert shared.drain()["metronome/attention/tokens_fed"] == 1


def test_tokens_behind_the_last_action_are_left_out_and_change_nothing(part, model):
    _, shared = pair(part, model)
    batch = workers.together(workers.groups((3,))[0])
    shortened = batch.action_mask.clone()
    shortened[:, 6:] = 0
    with torch.no_grad():
        whole = shared(batch.sequences, batch.action_mask, batch.attention_mask)
        shared.drain()
        short = shared(batch.sequences, shortened, batch.attention_mask)
    assert same([short[:, :6]], [whole[:, :6]])
    assert shared.drain()["metronome/attention/tokens_fed"] < int(batch.attention_mask.sum())


def test_experts_are_routed_the_same(part, tmp_path, eager):
    """OpenRLHF asks for router losses of every model that has them, and reads them only with a coefficient."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

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
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    stock, shared = pair(part, tmp_path)
    batch = rows()
    assert stock.model.config.output_router_logits
    assert same(outcome(shared, batch, drawn(batch)), outcome(stock, batch, drawn(batch)))


def test_what_the_actor_is_never_asked_for_is_an_error(part, model):
    _, shared = pair(part, model)
    batch = rows()
    with pytest.raises(MetronomeError, match="log-probs of action tokens"):
        shared(batch.sequences, attention_mask=batch.attention_mask, return_output=True)
    with pytest.raises(MetronomeError, match="pixel_values"):
        shared(batch.sequences, batch.action_mask, batch.attention_mask, pixel_values=torch.zeros(1))
    batch.attention_mask[:, :2] = 0
    with pytest.raises(ConfigurationError, match="side by side"):
        shared(batch.sequences, batch.action_mask, batch.attention_mask)


def test_a_model_that_cant_share_is_refused_by_name(part, model, tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config.from_pretrained(model, attention_dropout=0.1)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match="Qwen2ForCausalLM can't read shared prompts: dropout"):
        sharing_actor(part)(str(tmp_path), param_dtype="fp32")


def test_a_saved_model_has_nothing_of_ours(part, model, tmp_path):
    """flash-attn, OpenRLHF's default, isn't needed."""
    shared = sharing_actor(part)(str(model))
    shared.model.save_pretrained(tmp_path)
    assert "metronome" not in (tmp_path / "config.json").read_text()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen2"


# --- workers on DeepSpeed ---------------------------------------------------------------------------


def difference(one, other):
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {
            "algo__kl__use_loss": True,
            "algo__kl__init_coef": 0.1,
            "algo__kl__estimator": "k3",
            "actor__entropy_coef": 0.01,
            "actor__gradient_checkpointing_enable": True,
        },
        {"actor__loss_agg_mode": "seq-mean-token-mean", "ds__packing_samples": True},
        {"ds__lora__rank": 4, "ds__lora__alpha": 8},
    ],
    ids=["plain", "KL, entropy, checkpointing", "seq-mean, packing", "LoRA"],
)
@pytest.mark.parametrize("micro", [2, 4, 8])
def test_an_update_is_openrlhfs_own(model, eager, flags, micro):
    batch = workers.groups((4, 4, 4, 4))
    kl = 0.1 if "algo__kl__use_loss" in flags else 0.0
    own = {**flags, "ds__packing_samples": False}
    stock = workers.stock(workers.arguments(**own, train__micro_batch_size=micro), model)
    shared = workers.policy(workers.arguments(BLOCK, **flags, train__micro_batch_size=micro), model)
    wanted, found = workers.whole_step(stock, batch, kl), workers.whole_step(shared, batch, kl)
    assert difference(workers.moments(shared), workers.moments(stock)) < 5e-6
    assert found["actor_grad_norm"] == pytest.approx(wanted["actor_grad_norm"], rel=5e-6)
    assert set(wanted) - set(found) == set()
    for name in ("ppo_clip_ratio", "ppo_kl", "reward", "logprobs_diff"):  # its losses, as told, depend on its shuffle
        if name in wanted:
            assert found[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6)
    assert found["metronome/attention/calls"] == 16 // micro * 2
    prompts = sum(range(3, 7)) * max(1, 4 // micro)
    assert found["metronome/attention/tokens_fed"] == prompts + sum(
        int(row.action_mask.sum()) for group in batch for row in group
    )
    assert len(shared.trainer.replay_buffer.items) == 0


def test_two_epochs_and_two_steps_a_batch_take_as_many_rows_as_openrlhfs(model):
    batch = workers.groups((4, 4, 4, 4))
    steps = []
    for made, block in ((workers.stock, None), (workers.policy, BLOCK)):
        worker = made(
            workers.arguments(block, train__micro_batch_size=4, train__batch_size=8, train__max_epochs=2), model
        )
        workers.whole_step(worker, batch)
        steps.append((worker.actor.model.global_steps, worker.actor.model.micro_steps))
    assert steps[0] == steps[1] == (4, 8)


def test_a_streamed_part_is_trained_over_shared_prompts(model):
    batch = workers.groups((4, 4, 4, 4))
    stock = workers.stock(workers.arguments(train__micro_batch_size=4), model)
    workers.whole_step(stock, batch)
    shared = workers.policy(
        workers.arguments({**BLOCK, "rollout_source": "periodic"}, train__micro_batch_size=4), model
    )
    for group in (batch[2], batch[0], batch[3], batch[1]):
        shared.metronome_accumulate([workers.together(group)], 16, 0.0)
    status = shared.metronome_step(16)
    assert difference(workers.moments(shared), workers.moments(stock)) < 5e-6
    assert status["metronome/attention/calls"] == 8
    assert status["metronome/attention/tokens_separate"] > status["metronome/attention/tokens_fed"]


def test_weights_that_zero_3_cuts_are_trained_the_same(model):
    batch = workers.groups((4, 4, 4, 4))
    norms = []
    for made, block in ((workers.stock, None), (workers.policy, BLOCK)):
        worker = made(workers.arguments(block, train__micro_batch_size=4, ds__zero_stage=3), model)
        norms.append(workers.whole_step(worker, batch)["actor_grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=5e-6)


def test_old_and_reference_log_probs_are_openrlhfs_own(model):
    batch = rows()
    given = (batch.sequences, batch.action_mask, batch.attention_mask)
    stock = workers.stock(workers.arguments(rollout__temperature=0.7), model)
    args = workers.arguments(BLOCK, rollout__temperature=0.7, train__micro_batch_size=4)
    shared = workers.policy(args, model)
    wanted = stock.forward(*given)
    assert same([shared.forward(*given)], [wanted])
    found = {}
    for cls, settings in (
        (launcher.ReferenceModelActor.__ray_metadata__.modified_class, workers.arguments(rollout__temperature=0.7)),
        (MetronomeReference, args),
    ):
        worker = object.__new__(cls)
        cls.init_model_from_pretrained(worker, get_strategy(settings), str(model))
        found[cls] = worker.forward(*given)
        assert same([found[cls]], [wanted])
    assert launcher.Actor is Actor
    assert worker.model.drain()["metronome/attention/calls"] == 2


# --- arguments --------------------------------------------------------------------------------------


def test_a_run_says_where_groups_are_taken_apart():
    args = workers.parsed({**workers.FLAGS, "train.micro_batch_size": 6, "train.batch_size": 12})
    notes = arrange(args, dict(BLOCK), "cpu")
    assert sum("isn't a multiple of G = 4" in line for line in notes) == 2
    assert any("whole groups, where OpenRLHF draws single rows" in line for line in notes)
    args = workers.parsed({**workers.FLAGS, "train.micro_batch_size": 8, "rollout.micro_batch_size": 4})
    notes = arrange(args, dict(BLOCK), "cpu")
    assert not any("multiple of G" in line or "single rows" in line for line in notes)


# --- two ranks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_give_one_ranks_gradient(model, stage):
    """With ZeRO-3, of which every forward pass takes all ranks; one rank has nothing to compare at first."""
    batch = shared_two_ranks.batch()
    stock = workers.stock(workers.arguments(train__micro_batch_size=4), model)
    wanted = workers.whole_step(stock, batch)["actor_grad_norm"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = Path(shared_two_ranks.__file__)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), port, str(model), str(stage)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    said = [one.communicate(timeout=300)[0] for one in ranks]
    assert [one.returncode for one in ranks] == [0, 0], "\n".join(text[-3000:] for text in said)
    for text in said:
        found = json.loads(text.strip().splitlines()[-1])
        assert found["actor_grad_norm"] == pytest.approx(wanted, rel=5e-6)
        assert found["checked"]
