"""Running requests at a publication: finished, aborted or resumed, on the CPU room's real server and in main_ppo."""

import asyncio
import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")
pytest.importorskip("transfer_queue", reason="verl's V1 trainer needs TransferQueue (requirements/verl.txt)")

import ray_session
import test_versions
import torch
from ray_session import run_main_ppo
from test_config import POOL as CONFIGURED
from test_config import arranged
from test_cpu_room import GREEDY, PROMPTS, changed_weights, in_flight, slow_server
from test_verl_end_to_end import POOL, overrides
from verl.trainer.ppo.v1.trainer_separate_async import PPOTrainerSeparateAsync

from metronome.errors import ConfigurationError, WaitTimeout
from metronome_verl import bounded, publication
from metronome_verl.bounded import BoundedTrainer
from metronome_verl.cpu import assets
from metronome_verl.publication import Door, OneVersionClient, finished
from metronome_verl.versions import SPANS, SpanRecordingClient, token_versions

BOUNDED = ("+metronome.rollout_source=bounded", *CONFIGURED)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    torch.set_num_threads(1)
    return assets.make(tmp_path_factory.mktemp("assets"))


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """verl and our restart wait a second before they try again."""
    sleep = asyncio.sleep
    for module in ("verl.workers.rollout.llm_server", "metronome_verl.publication"):
        monkeypatch.setattr(f"{module}.asyncio", SimpleNamespace(**(vars(asyncio) | {"sleep": lambda _: sleep(0.001)})))


class Remote:
    """An object's methods as those of a Ray actor; they run at once, like messages in their order."""

    def __init__(self, thing, results=False):
        self._thing, self._results = thing, results

    def __getattr__(self, name):
        method = getattr(self._thing, name)

        def remote(*arguments, **options):
            found = method(*arguments, **options)
            return found if asyncio.iscoroutine(found) or self._results else done(found)

        return SimpleNamespace(remote=remote)


def done(value):
    future = asyncio.get_running_loop().create_future()
    future.set_result(value)
    return future


def client(server, cls=OneVersionClient, **options):
    config = SimpleNamespace(
        actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name="fake", response_length=12))
    )
    made = cls(config=config, **options)

    async def acquire(request_id, **_):
        return "server", Remote(server)

    made._acquire_server = acquire
    made._release_server = lambda *_, **__: None
    return made


def ask(made, prompt=PROMPTS[0], request_id="r"):
    return asyncio.create_task(made.generate(request_id, prompt_ids=prompt, sampling_params={**GREEDY}))


async def publish(server, version):
    """verl's order: abort, weights, resume."""
    report = await server.abort_all_requests()
    await server.load_weights(changed_weights(server), global_steps=version)
    await server.resume_generation()
    return report["aborted_count"]


# --- what a response is made of -----------------------------------------------------------------------


@pytest.mark.parametrize(("cls", "versions"), [(OneVersionClient, {2}), (SpanRecordingClient, {1, 2})])
def test_an_aborted_request_begins_anew_and_a_resumed_one_keeps_its_tokens(tiny, cls, versions):
    server = slow_server(tiny)

    async def over_a_publication():
        await server.load_weights(server._model.state_dict(), global_steps=1)
        going = ask(client(server, cls))
        await in_flight(server, 4)
        assert await publish(server, 2) == 1
        return await going

    output = asyncio.run(over_a_publication())
    assert len(output.token_ids) == len(output.log_probs) == 12
    assert {version for version, _ in output.extra_fields[SPANS]} == versions
    assert sum(tokens for _, tokens in output.extra_fields[SPANS]) == 12  # nothing of what was thrown away
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (min(versions), 2)
    assert set(token_versions(output.extra_fields, 12, [1] * 12)) == versions
    anew = asyncio.run(server.generate(PROMPTS[0], GREEDY, "x"))  # the new weights' own answer, greedily
    assert (output.token_ids == anew.token_ids) == (versions == {2})


@pytest.mark.parametrize("word", ["aborted", "abort"])
def test_each_engine_s_word_for_an_abort_begins_the_request_anew(word):
    """vLLM's and SGLang's, as verl's servers pass them on."""
    server = test_versions.Server((3, 4, word), (4, 0, word), (6, 5, "completed"))
    output = asyncio.run(test_versions.generate(test_versions.client(server, OneVersionClient)))
    assert server.prompts == [[1, 2]] * 3  # behind nothing that was thrown away
    assert output.token_ids == [106] * 5
    assert output.extra_fields[SPANS] == [[6, 5]]


def test_a_response_over_three_versions_says_so_token_by_token(tiny):
    server = slow_server(tiny)

    async def over_two_publications():
        await server.load_weights(server._model.state_dict(), global_steps=1)
        going = ask(client(server, SpanRecordingClient))
        for version in (2, 3):
            await in_flight(server, 3)
            await publish(server, version)
        return await going

    output = asyncio.run(over_two_publications())
    spans = output.extra_fields[SPANS]
    assert [version for version, _ in spans] == [1, 2, 3]
    expected = [version for version, tokens in spans for _ in range(tokens)]
    assert token_versions(output.extra_fields, 12, [1] * 12) == expected


def test_a_publication_that_finishes_waits_for_what_runs_and_holds_what_comes(tiny):
    server, door = slow_server(tiny), Door()

    async def over_a_publication():
        await server.load_weights(server._model.state_dict(), global_steps=1)
        made = client(server, door=Remote(door))
        running = ask(made)
        await in_flight(server, 4)
        assert door.shut() == 1
        late = ask(made, PROMPTS[1], "late")
        while door.inside():
            await asyncio.sleep(0.002)
        assert not late.done()
        assert server._batch.rows == []  # the late one hasn't reached the server
        assert await publish(server, 2) == 0  # nothing is left to abort
        door.open()
        return await running, await late

    running, late = asyncio.run(over_a_publication())
    assert running.extra_fields[SPANS] == [[1, 12]]
    assert late.extra_fields[SPANS] == [[2, 12]]
    assert door.inside() == 0


def test_between_two_turns_nothing_is_waited_for(tiny):
    server, door = slow_server(tiny), Door()

    async def a_tool_that_takes_longer_than_the_publication():
        await server.load_weights(server._model.state_dict(), global_steps=1)
        made = client(server, door=Remote(door))
        first = await ask(made)
        assert door.shut() == 0  # the trajectory isn't over, and nothing of it runs
        second = ask(made, PROMPTS[0] + first.token_ids + [7, 8])
        await asyncio.sleep(0.02)
        assert await publish(server, 2) == 0
        door.open()
        return first, await second

    first, second = asyncio.run(a_tool_that_takes_longer_than_the_publication())
    assert second.extra_fields[SPANS] == [[2, 12]]
    mask = [1] * 12 + [0, 0] + [1] * 12
    assert token_versions(first.extra_fields, 26, mask) == [1] * 12 + [-1] * 2 + [2] * 12  # each turn of one version


def test_a_request_that_fails_leaves_the_door(tiny):
    server, door = slow_server(tiny), Door()

    async def too_long():
        await ask(client(server, door=Remote(door)), [5] * 512)

    with pytest.raises(ConfigurationError, match="leaves no room"):
        asyncio.run(too_long())
    assert door.inside() == 0


# --- the trainer's side -------------------------------------------------------------------------------


class Clock:
    """Time that passes in pauses; after each, ``happens`` is called with it."""

    def __init__(self, monkeypatch, happens=lambda now: None):
        self.now, self.happens = 0.0, happens
        monkeypatch.setattr(publication, "time", self)
        monkeypatch.setattr(publication, "ray", SimpleNamespace(get=lambda value: value))

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.happens(self.now)


def test_the_wait_tells_what_it_waits_for_and_opens_afterwards(monkeypatch, capsys):
    door = Door()
    assert door.enter()
    assert door.enter()

    def happens(now):
        if (door.inside() == 2 and now > 12) or (door.inside() == 1 and now > 25):
            door.leave()

    clock = Clock(monkeypatch, happens)
    with finished(Remote(door, results=True), 7) as waited:
        assert door.inside() == 0
        assert not door.enter()
    assert 25 < waited == clock.now < 26
    assert door.enter()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "metronome: the publication of version 7 waits for 2 requests"
    assert lines[-1] == "metronome: the publication of version 7 waits for 1 requests"
    assert len(lines) == 3  # at once, then every ten seconds


def test_nothing_running_is_no_wait(monkeypatch, capsys):
    Clock(monkeypatch)
    with finished(Remote(Door(), results=True), 7) as waited:
        assert waited == 0
    assert capsys.readouterr().out == ""


def test_requests_that_never_end_are_given_up_after_half_an_hour_of_silence(monkeypatch):
    door = Door()
    for _ in range(3):
        door.enter()
    left = []
    clock = Clock(monkeypatch, lambda now: now > 1000 and not left and (left.append(now), door.leave()))
    words = r"half an hour[^$]*2 requests, version 7[^$]*in_flight=finish[^$]*abort"
    with pytest.raises(WaitTimeout, match=words), finished(Remote(door, results=True), 7):
        pass
    assert left[0] + 1800 < clock.now < left[0] + 1802  # the silence counts, not the whole wait


@contextmanager
def shut(door, version):
    door.append(f"shut {version}")
    yield 2.5
    door.append("open")


def test_only_finish_shuts_the_door_around_verl_s_publication(monkeypatch):
    done, made = [], {}
    manager = SimpleNamespace(get_client=lambda client_cls, **options: (client_cls, options))

    def theirs(self):
        done.append("published")
        self._pending_sync_metrics = {}

    monkeypatch.setattr(PPOTrainerSeparateAsync, "on_step_end", theirs)
    monkeypatch.setattr(bounded, "make_door", lambda: done)
    monkeypatch.setattr(bounded, "finished", shut)
    for in_flight_ in ("finish", "abort", "resume"):
        trainer = object.__new__(BoundedTrainer)
        trainer.arranged, trainer.standalone_server_manager = SimpleNamespace(in_flight=in_flight_), manager
        trainer.global_steps = 3
        cls, options = trainer.get_llm_client()
        trainer.on_step_end()
        made[in_flight_] = cls, options, list(done), trainer._pending_sync_metrics
        done.clear()
    waited = {"metronome/publication/seconds_waiting": 2.5}
    assert made["finish"][0] is OneVersionClient
    assert made["finish"][2:] == (["shut 3", "published", "open"], waited)
    assert made["abort"] == (OneVersionClient, {"door": None}, ["published"], {})
    assert made["resume"] == (SpanRecordingClient, {}, ["published"], {})


# --- the key ------------------------------------------------------------------------------------------


def test_bounded_mode_resumes_unless_told_otherwise_and_the_key_is_ours_alone():
    assert arranged(*BOUNDED)[1].in_flight == "resume"
    config, found = arranged(*BOUNDED, "+metronome.in_flight=abort")
    assert found.in_flight == "abort"
    assert "in_flight" not in found.block  # no plug-in's: settings, workers and checkpoints never see it
    assert "in_flight" not in config.actor_rollout_ref.rollout.custom.metronome.block


@pytest.mark.parametrize("mode", ["periodic", "synchronous"])
def test_where_nothing_runs_at_a_publication_only_finish_is_accepted(mode):
    chosen = [f"+metronome.rollout_source={mode}", *(CONFIGURED if mode == "periodic" else [])]
    assert arranged(*chosen)[1].in_flight == arranged(*chosen, "+metronome.in_flight=finish")[1].in_flight == "finish"
    for word in ("abort", "resume"):
        with pytest.raises(ConfigurationError, match=f"in {mode} mode no request runs[^$]*in_flight=finish"):
            arranged(*chosen, f"+metronome.in_flight={word}")


def test_another_word_is_refused_with_the_nearest():
    with pytest.raises(ConfigurationError, match=r"metronome.in_flight[^$]*'resume'"):
        arranged(*BOUNDED, "+metronome.in_flight=resum")


# --- main_ppo -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_finish_every_response_that_main_ppo_trains_is_of_one_version(tiny):
    ours = [
        "+metronome.rollout_source=bounded",
        "+metronome.bounded.max_staleness=4",
        "+metronome.loss=a3po",
        "+metronome.in_flight=finish",
        "trainer.v1.separate_async.num_warmup_batches=1",
        "trainer.v1.separate_async.parameter_sync_step=1",
        # a batch at a time, 3 s each and longer than an update, so that requests run at publications
        "actor_rollout_ref.rollout.engine_kwargs.metronome_hf.seconds_per_token=0.2",
        "actor_rollout_ref.rollout.max_num_seqs=16",
        "trainer.total_training_steps=4",
    ]
    output = run_main_ppo(overrides(tiny, *POOL, *ours), ray_session.shared_session(), timeout=840)
    assert output.returncode == 0, output.tail()
    assert re.search(r"metronome: the publication of version \d waits for \d+ requests", output.text)
    assert max(step["metronome/publication/seconds_waiting"] for step in output.metrics) > 0.2
    for step in output.metrics:
        assert step["training/off_policy/trajectory_spans/max"] == 1
        assert step["metronome/loss/version_unknown"] == 0
    assert max(step["metronome/loss/staleness_max"] for step in output.metrics) > 0  # over publications all the same
