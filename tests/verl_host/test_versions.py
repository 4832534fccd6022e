"""Versions per token: recorded over interruptions and turns by the client, laid out along the response."""

import asyncio
import gc
import pickle
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import workers  # noqa: F401  (verl on the CPU)
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from metronome.errors import VersionMismatch
from metronome_verl import versions as recorded
from metronome_verl.versions import SPANS, SpanRecordingClient, token_versions


class Server:
    """Answers each request with the next of ``segments``: (version, tokens, stop_reason)."""

    def __init__(self, *segments):
        self.segments = list(segments)
        self.prompts = []
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(self, *, prompt_ids, **_):
        await asyncio.sleep(0)
        self.prompts.append(list(prompt_ids))
        version, tokens, reason = self.segments.pop(0)
        return TokenOutput(
            token_ids=[100 + version if version is not None else 100] * tokens,
            log_probs=[-1.0] * tokens,
            stop_reason=reason,
            extra_fields={"global_steps": version},
        )


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """verl waits a second before it resumes."""
    sleep = asyncio.sleep
    monkeypatch.setattr("verl.workers.rollout.llm_server.asyncio.sleep", lambda _: sleep(0))


def client(server, cls=SpanRecordingClient):
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name="fake")))
    made = cls(config=config)

    async def acquire(request_id, **_):
        return "server", server

    made._acquire_server = acquire
    made._release_server = lambda *_, **__: None
    return made


def generate(made, request_id="r", prompt=(1, 2), max_tokens=64):
    return made.generate(request_id, prompt_ids=list(prompt), sampling_params={"max_tokens": max_tokens})


def test_a_response_aborted_twice_has_the_versions_of_its_three_segments():
    server = Server((3, 4, "aborted"), (4, 3, "aborted"), (6, 5, "completed"))
    output = asyncio.run(generate(client(server)))
    assert output.extra_fields[SPANS] == [[3, 4], [4, 3], [6, 5]]
    assert token_versions(output.extra_fields, 12, [1] * 12) == [3] * 4 + [4] * 3 + [6] * 5
    assert [token - 100 for token in output.token_ids] == [3] * 4 + [4] * 3 + [6] * 5
    assert [len(prompt) for prompt in server.prompts] == [2, 6, 9]  # resumed behind what was generated
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (3, 6)


def test_verl_s_own_client_keeps_no_versions_per_token():
    server = Server((3, 4, "aborted"), (4, 3, "completed"))
    output = asyncio.run(generate(client(server, FullyAsyncLLMServerClient)))
    assert SPANS not in output.extra_fields
    assert token_versions(output.extra_fields, 7, [1] * 7) == [-1] * 7  # two versions, and no telling where


def test_an_uninterrupted_response_is_one_span_and_equal_versions_join():
    plain = asyncio.run(generate(client(Server((5, 6, "completed")))))
    assert plain.extra_fields[SPANS] == [[5, 6]]
    joined = asyncio.run(generate(client(Server((5, 2, "aborted"), (5, 0, "aborted"), (5, 1, "completed")))))
    assert joined.extra_fields[SPANS] == [[5, 3]]


def test_an_unstamped_server_gives_unknown_versions():
    output = asyncio.run(generate(client(Server((None, 3, "completed")))))
    assert token_versions(output.extra_fields, 3, [1] * 3) == [-1] * 3


def test_requests_at_the_same_time_keep_their_segments_apart():
    async def both():
        made = client(Server(*[(version, 2, "aborted") for version in (1, 1, 2, 2)], (3, 1, "stop"), (3, 1, "stop")))
        return await asyncio.gather(generate(made, "a"), generate(made, "b"))

    for output in asyncio.run(both()):
        assert sum(tokens for _, tokens in output.extra_fields[SPANS]) == len(output.token_ids) == 5
        assert output.extra_fields[SPANS] == [[1, 2], [2, 2], [3, 1]]


def test_turns_of_one_request_add_to_the_first_turn_s_spans_and_keep_their_own():
    server = Server((1, 2, "completed"), (1, 1, "aborted"), (2, 2, "completed"))
    made = client(server)

    async def turns():
        return [await generate(made), await generate(made)]

    first, second = asyncio.run(turns())
    assert second.extra_fields[SPANS] == [[1, 1], [2, 2]]
    assert first.extra_fields[SPANS] == [[1, 2], [1, 0], [1, 1], [2, 2]]
    # a tool's three tokens stand between the turns; the tool agent keeps the first turn's extra fields
    mask = [1, 1, 0, 0, 0, 1, 1, 1]
    assert token_versions(first.extra_fields, 8, mask) == [1, 1, -1, -1, -1, 1, 2, 2]


def test_a_row_that_begins_with_a_later_turn_has_that_turn_s_versions_and_those_after_it():
    made = client(Server((1, 2, "completed"), (2, 3, "completed"), (3, 1, "completed")))

    async def turns():
        return [await generate(made) for _ in range(3)]

    first, second, third = asyncio.run(turns())
    # one row of the first turn, one of the other two with a tool's token between
    assert token_versions(first.extra_fields, 2, [1, 1]) == [1, 1]
    assert token_versions(second.extra_fields, 5, [1, 1, 1, 0, 1]) == [2, 2, 2, -1, 3]
    with pytest.raises(VersionMismatch, match="extra_fields of its first turn"):
        token_versions(third.extra_fields, 5, [1, 1, 1, 0, 1])


def test_requests_of_one_trajectory_at_the_same_time_are_no_turns_of_each_other():
    made = client(Server((1, 2, "completed"), (1, 3, "completed"), (2, 1, "completed")))

    async def branches():
        first, second = await asyncio.gather(generate(made), generate(made))
        return first, second, await generate(made)

    first, second, _ = asyncio.run(branches())
    assert first.extra_fields[SPANS] == [[1, 2], [2, 0], [2, 1]]
    assert second.extra_fields[SPANS] == [[1, 3], [2, 0], [2, 1]]


def test_tokens_taken_off_a_turn_s_end_do_not_shift_the_versions_of_the_next():
    # verl's GLM and Gemma templates drop a turn's last tokens before a tool's; the mask says where the turn ends
    spans = [[1, 2], [2, 2], [3, 0], [3, 3]]
    assert token_versions({SPANS: spans}, 8, [1, 1, 1, 0, 0, 1, 1, 1]) == [1, 1, 2, -1, -1, 3, 3, 3]
    assert token_versions({SPANS: spans}, 7, [1, 1, 1, 0, 0, 1, 1]) == [1, 1, 2, -1, -1, 3, 3]  # and cut off at the end
    assert token_versions({SPANS: spans}, 7, [1] * 7) == [1, 1, 2, 2, 3, 3, 3]  # no tool between the turns
    flat = [span for span in spans if span[1]]  # without the mark of a turn the next one would begin too early
    assert token_versions({SPANS: flat}, 8, [1, 1, 1, 0, 0, 1, 1, 1]) == [1, 1, 2, -1, -1, 2, 3, 3]


def test_a_segment_aborted_before_its_first_token_is_no_version_of_the_response():
    output = asyncio.run(generate(client(Server((3, 0, "aborted"), (4, 2, "completed")))))
    assert (output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]) == (4, 4)
    theirs = asyncio.run(generate(client(Server((3, 0, "aborted"), (4, 2, "completed")), FullyAsyncLLMServerClient)))
    assert theirs.extra_fields["min_global_steps"] == 3


def test_spans_die_with_their_trajectory():
    output = asyncio.run(generate(client(Server((1, 2, "completed"))), "short-lived"))
    assert "short-lived" in recorded._turns
    del output
    gc.collect()
    assert "short-lived" not in recorded._turns


def test_spans_survive_verl_s_agent_output_and_the_client_travels_to_another_process():
    made = client(Server((1, 2, "aborted"), (2, 2, "completed")))
    output = asyncio.run(generate(made))
    rows = AgentLoopOutput(
        prompt_ids=[1, 2],
        response_ids=output.token_ids,
        response_mask=[1] * 4,
        response_logprobs=output.log_probs,
        num_turns=2,
        metrics=AgentLoopMetrics(),
        extra_fields=output.extra_fields,
    ).as_dict()
    kept = pickle.loads(pickle.dumps(rows["extra_fields"]))
    assert kept[SPANS] == [[1, 2], [2, 2]]
    again = pickle.loads(pickle.dumps(SpanRecordingClient(config=SimpleNamespace())))
    assert isinstance(again, LLMServerClient)


def test_a_response_cut_at_its_longest_takes_the_first_tokens_of_its_spans():
    assert token_versions({SPANS: [[1, 3], [2, 4]]}, 5, [1] * 5) == [1, 1, 1, 2, 2]


def test_a_trajectory_of_one_version_needs_no_spans():
    fields = {"min_global_steps": 7, "max_global_steps": 7}
    assert token_versions(fields, 4, [1, 0, 1, 1]) == [7, -1, 7, 7]
    assert token_versions({}, 2, [1, 1]) == [-1, -1]


def test_spans_that_miss_tokens_are_refused():
    with pytest.raises(VersionMismatch, match="fewer tokens than were generated"):
        token_versions({SPANS: [[1, 3]]}, 4, [1] * 4)
    with pytest.raises(VersionMismatch, match="one entry per token"):
        token_versions({SPANS: [[1, 3]]}, 3, [1] * 4)
