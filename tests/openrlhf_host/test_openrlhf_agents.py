"""Agents of several turns: what tools say is in the context and not in the loss; every token has its version."""

import asyncio
import itertools

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need OpenRLHF (requirements/openrlhf.txt)")

import openrlhf_room  # noqa: F401  # before the imports below

# isort: split

import local_ray
import openrlhf_controller
import openrlhf_session
import torch
import workers
from openrlhf_agents import AGENT, Agents, log_prob, rollout
from openrlhf_controller import build
from vllm import SamplingParams

from metronome.errors import MetronomeError, VersionMismatch
from metronome_openrlhf.cpu import assets
from metronome_openrlhf.samples import MetronomeSamples

LENGTH = 64
FLAGS = {
    "data__max_len": 48,
    "train__agent_func_path": "agent.py",
    "train__micro_batch_size": 4,
    "rollout__micro_batch_size": 4,
}
SHARED = {"rollout_source": "periodic", "attention": "shared_prompt"}


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a rollout engine with an agent; ``start.loop`` runs it."""
    monkeypatch.setenv("RAY_ADDRESS", "none")  # OpenRLHF's engine looks for Ray's otherwise
    for name in ("VLLM_ALLOW_INSECURE_SERIALIZATION", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "0")
    openrlhf_controller.install(monkeypatch.setattr)
    monkeypatch.setattr(local_ray, "together", 1)
    local_ray.order.seed(0)
    loop = asyncio.new_event_loop()

    def started(agent=AGENT, seed=7):
        (tmp_path / "agent.py").write_text(agent)
        assets = workers.model(tmp_path)
        return loop.run_until_complete(rollout(monkeypatch.setattr, assets, tmp_path / "agent.py", seed))

    started.loop, started.folder = loop, tmp_path
    yield started
    loop.close()


def agents_module(actor):
    """The globals of the agent's file."""
    return type(actor.executor).execute.__globals__


async def ask(actor, samples=1, prompt="1+2="):
    wanted = SamplingParams(max_tokens=40, logprobs=1)
    return await actor.generate_responses(prompt, "3", wanted, LENGTH, actor.vllm.tokenizer, samples)


async def until(condition):
    for _ in range(20000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("nothing came")


async def publish(actor, version, *, abort=False):
    """As our trainers publish in bounded mode."""
    await actor.pause_generation()
    actor.vllm.weights = version
    await actor.set_version(version)
    if abort:
        await actor.abort_running()
    await actor.resume_generation()


def experience(actor, response):
    """What our generator makes of a response."""
    made = object.__new__(MetronomeSamples)
    return made._process_response_into_experience(response, max_len=LENGTH)


def aligned(row, shift=0):
    """Whether every sampled token has the log-prob that its version gave at its place."""
    mask = row.action_mask[0].bool()
    places = torch.arange(1, len(mask) + 1) + shift
    expected = torch.tensor(
        [log_prob(int(version), int(place)) for version, place in zip(row.versions[0], places, strict=True)]
    )
    return torch.allclose(row.rollout_log_probs[0][mask], expected[mask], atol=1e-6)


def check_row(row, response, given):
    """Holds a row to what the engine was asked and gave, turn by turn."""
    tokens = response["observation_tokens"]
    mask = row.action_mask[0].bool()
    assert row.sequences[0].tolist() == tokens
    assert aligned(row)
    assert not aligned(row, 1)
    assert not row.rollout_log_probs[0][~mask].any()
    assert (row.versions[0][~mask] == -1).all()
    assert (row.versions[0][mask] >= 0).all()
    sampled = set()
    for context, found in given:
        assert tokens[: len(context)] == context  # earlier turns and what the environment said are in the context
        assert tokens[len(context) : len(context) + len(found)] == found
        sampled |= set(range(len(context), len(context) + len(found)))
    assert (mask.nonzero()[:, 0] + 1).tolist() == sorted(sampled)


# --- tokens, log-probs and versions ---------------------------------------------------------------------


def test_each_token_of_several_turns_has_its_own_log_prob_and_version_over_publications(start):
    actor = start()
    agent = agents_module(actor)

    async def talk():
        agent["ENVIRONMENT"] = asyncio.Event()
        asked = asyncio.ensure_future(ask(actor))
        await until(lambda: len(actor.vllm.given) == 1)
        await publish(actor, 1)  # between two turns
        actor.vllm.slow = 0.01
        agent["ENVIRONMENT"].set()
        await until(lambda: any(request.seen == 2 for request in actor._requests))
        await publish(actor, 2)  # within the second turn, which goes on
        actor.vllm.slow = 0.0
        return await asked

    (response,) = start.loop.run_until_complete(talk())
    row = experience(actor, response)
    check_row(row, response, actor.vllm.given)
    assert len(response["action_ranges"]) == 3
    assert [version for version, _ in response["metronome_spans"]] == [0, 1, 2]
    (first, second, third) = response["action_ranges"]
    versions = [-1, *row.versions[0].tolist()]
    assert set(versions[slice(*first)]) == {0}
    assert set(versions[slice(*second)]) == {1, 2}
    assert set(versions[slice(*third)]) == {2}
    assert row.info["fed"] > 0
    assert row.action_mask.sum() == row.info["sampled"]


def test_aborted_samples_begin_anew_with_their_environment(start):
    actor = start()
    agent = agents_module(actor)

    async def talk():
        agent["ENVIRONMENT"] = asyncio.Event()
        asked = asyncio.ensure_future(ask(actor, samples=2))
        await until(lambda: len(actor.vllm.given) == 2)  # both wait for their environment after the first turn
        actor.vllm.slow = 0.01
        agent["ENVIRONMENT"].set()
        await until(lambda: any(request.seen == 2 for request in actor._requests))
        await publish(actor, 1, abort=True)
        actor.vllm.slow = 0.0
        return await asked

    responses = start.loop.run_until_complete(talk())
    assert actor.restarted == 2
    assert len(agent["resets"]) == 4
    for response in responses:
        assert response["metronome_spans"] == [[1, int(response["extra_logs"]["sampled"])]]
        row = experience(actor, response)
        given = [
            (context, found)
            for context, found in actor.vllm.given[2:]
            if response["observation_tokens"][: len(context) + len(found)] == context + found
        ]
        check_row(row, response, given)


def test_a_row_that_is_longer_than_the_context_loses_its_end_and_nothing_moves(start):
    actor = start()
    (response,) = start.loop.run_until_complete(ask(actor))
    made = object.__new__(MetronomeSamples)
    full = experience(actor, response)
    cut = response["action_ranges"][-1][0] + 2
    row = made._process_response_into_experience(response, max_len=cut)
    for name in ("versions", "action_mask", "rollout_log_probs"):
        assert torch.equal(getattr(row, name), getattr(full, name)[:, : cut - 1])


def test_a_turn_of_another_engine_is_of_unknown_version_and_no_period_trains_it(start):
    other = AGENT.replace(
        "return {**made,", "made['observation_tokens'][made['action_ranges'][-1][0]] = 7\n        return {**made,"
    )
    actor = start(other)
    made = build(start.folder, SHARED, engines=[Agents(actor, start.loop)], data__max_samples=4, **FLAGS)
    with pytest.raises(VersionMismatch, match="versions -1 to 0"):
        made.fit()


# --- what OpenRLHF doesn't take -------------------------------------------------------------------------


def test_an_executor_that_gives_several_rows_of_one_rollout_is_an_error_that_says_so(start):
    actor = start(AGENT.replace("return {**made,", "return [made, made]\n        return {**made,"))
    with pytest.raises(MetronomeError, match="one dict") as found:
        start.loop.run_until_complete(ask(actor))
    assert found.value.found == "list"
    assert "--rollout.n_samples_per_prompt" in str(found.value.remedy)


def test_openrlhf_itself_reads_one_row_a_response(start):
    with pytest.raises(TypeError, match="list indices"):
        super(MetronomeSamples, object.__new__(MetronomeSamples))._process_response_into_experience([{}, {}])


# --- training -------------------------------------------------------------------------------------------


def statuses(start, block, kl=False, **flags):
    made = build(start.folder, block, engines=[Agents(start(), start.loop)], kl=kl, **FLAGS, **flags)
    made.fit()
    return made, [one.status for one in made.logs]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_a_run_over_shared_prompts_takes_openrlhfs_own_step(start, mode):
    """Rows of a group share the prompt of their first turn; what follows is each row's own."""
    flags = {"data__max_samples": 4, "actor__loss_agg_mode": mode}
    stock, (expected,) = statuses(start, None, **flags)
    made, (found,) = statuses(start, SHARED, **flags)
    assert found["actor_grad_norm"] == pytest.approx(expected["actor_grad_norm"], rel=1e-5)
    ours, theirs = workers.moments(made.worker), workers.moments(stock.worker)
    assert float((ours - theirs).norm() / theirs.norm()) < 2e-6
    assert found["turns"] == expected["turns"] > 2
    assert found["metronome/periodic/tokens"] == pytest.approx(found["sampled"] * 16)
    assert found["fed"] > 1
    shared = found["metronome/attention/tokens_separate"] - found["metronome/attention/tokens_fed"]
    assert shared == 2 * 4 * 3 * len("1+2")  # old log-probs and the update, four groups, three copies of a prompt


def rows_of(start, block, count=2):
    """The made rows of ``count`` groups, and the controller."""
    made = build(start.folder, block, engines=[Agents(start(), start.loop)], **FLAGS)
    generator = made.samples_generator
    refs = [
        generator._dispatch_prompts_to_vllm([f"{one}+1="], ["2"], images=[None], **made.generate_kwargs)[0]
        for one in range(count)
    ]
    groups = [
        [generator._process_response_into_experience(one, **made.generate_kwargs) for one in ref.value] for ref in refs
    ]
    return made, groups


def test_log_probs_over_a_shared_prompt_are_those_of_separate_rows(start):
    plain, groups = rows_of(start, {"rollout_source": "periodic"})
    expected = [row for group in plain.experience_maker.make_groups(groups) for row in group]
    made, groups = rows_of(start, SHARED)
    found = [row for group in made.experience_maker.make_groups(groups) for row in group]
    assert len(found) == 8
    for row, other in zip(found, expected, strict=True):
        assert torch.equal(row.sequences, other.sequences)
        assert (row.action_log_probs - other.action_log_probs).abs().max() < 2e-5
        runs = [on for on, _ in itertools.groupby(row.action_mask[0].tolist())]
        assert runs == [0, 1, 0, 1, 0, 1]  # the prompt, and what was fed back twice


def test_what_is_fed_back_changes_later_turns_and_is_not_trained_itself(start):
    made, groups = rows_of(start, {"rollout_source": "periodic"})
    (row, *_), *_ = made.experience_maker.make_groups(groups)
    mask = row.action_mask[0].bool()
    fed = [place for place in range(int(mask.nonzero()[0]), int(mask.nonzero()[-1])) if not mask[place]]
    assert fed

    def gradient(**other):
        worker = workers.policy(workers.arguments({"rollout_source": "periodic"}, **FLAGS), start.folder / "model")
        (one,) = workers.copied([row])
        for name, value in other.items():
            setattr(one, name, value)
        worker.metronome_accumulate([workers.together([one])], 16, 0.0)
        worker.metronome_step(1)
        return workers.moments(worker), one

    plain, _ = gradient()
    loud = {}
    for name in ("advantages", "action_log_probs"):
        value = getattr(row, name).clone().float()
        value[0, fed] = 3.0
        loud[name] = value
    assert torch.equal(gradient(**loud)[0], plain)
    spoken = row.sequences.clone()
    spoken[0, fed[0] + 1] = 5 + (int(spoken[0, fed[0] + 1]) == 5)
    assert not torch.allclose(gradient(sequences=spoken)[0], plain, rtol=1e-3)
    trained = row.action_mask.clone()
    trained[0, fed] = 1
    assert not torch.allclose(gradient(action_mask=trained)[0], plain, rtol=1e-3)


# --- the whole run --------------------------------------------------------------------------------------


def test_turns_over_publications_with_two_engines_and_two_ranks(tmp_path):
    tiny = assets.make(tmp_path / "assets")
    agent = tmp_path / "agent.py"
    # An environment that takes as long as a step, so that publications fall between turns.
    agent.write_text(AGENT.replace("self.turns += 1\n", "self.turns += 1\n        await asyncio.sleep(0.3)\n"))
    flags = [
        *("--train.agent_func_path", str(agent), "--data.max_len", "256", "--data.max_samples", "24"),
        *("--vllm.num_engines", "2", "--actor.num_gpus_per_node", "2", "--metronome.rollout_source", "bounded"),
        *("--metronome.bounded.max_staleness", "2", "--metronome.in_flight", "resume"),
        *("--metronome.loss", "a3po", "--metronome.attention", "shared_prompt"),
    ]
    found = openrlhf_session.run(["--metronome.cpu", *openrlhf_session.stock(tiny, tmp_path), *flags])
    assert found.returncode == 0, found.tail()
    assert [one["step"] for one in found.steps] == [1, 2, 3, 4, 5, 6]
    for step, one in enumerate(found.steps):
        assert one["rollout/num_samples"] == 16
        assert one["turns"] > 2
        assert one["fed"] > 1
        assert one["actor_grad_norm"] > 0
        assert one["metronome/weights/changed"] == 1
        assert one["metronome/loss/version_unknown"] == 0
        assert one["metronome/bounded/staleness_max"] == one["metronome/loss/staleness_max"] <= min(step, 2)
        assert one["metronome/attention/tokens_fed"] < one["metronome/attention/tokens_separate"]
    assert max(one["metronome/bounded/staleness_max"] for one in found.steps) == 2
    assert max(one["metronome/loss/off_behavior"] for one in found.steps) > 0.5
    assert max(one["metronome/bounded/rows_over_publications"] for one in found.steps) > 0
    assert abs(found.steps[0]["metronome/loss/approx_kl"]) < 2e-3
