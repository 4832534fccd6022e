"""The CPU room's rollout server in this process, without Ray."""

import asyncio

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")

import torch
from omegaconf import OmegaConf

from metronome.errors import ConfigurationError, WorkerFailed
from metronome_verl import cpu
from metronome_verl.cpu import assets

cpu.attach()

from verl.workers.config import RolloutConfig  # noqa: E402

from metronome_verl.cpu.server import HFServer, check  # noqa: E402

GREEDY = {"temperature": 0, "logprobs": True}
WARM = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [40, 41], [5, 6, 7, 8, 9, 10, 11], [100, 90, 80, 70, 60], [200])


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return assets.make(tmp_path_factory.mktemp("assets"))


@pytest.fixture
def server(tiny):
    return make_server(tiny)


def make_server(tiny, **options):
    return HFServer(rollout_config(**options), OmegaConf.create({"path": str(tiny.model)}))


def rollout_config(**options):
    base = {"name": cpu.ROLLOUT, "tensor_model_parallel_size": 1, "prompt_length": 64, "response_length": 12}
    return RolloutConfig(**(base | options))


def slow_server(tiny, seconds=0.01):
    return make_server(tiny, engine_kwargs={cpu.ROLLOUT: {"seconds_per_token": seconds}}, ignore_eos=True)


def generated(server, prompts, params, **more):
    async def together():
        return await asyncio.gather(
            *[server.generate(prompt, params, f"r{place}", **more) for place, prompt in enumerate(prompts)]
        )

    return asyncio.run(together())


def plain_log_probs(server, prompt, tokens, temperature=1.0):
    """One forward over prompt and response, no cache, no batch: log softmax(logits / temperature) of each token."""
    with torch.no_grad():
        logits = server._model(input_ids=torch.tensor([prompt + tokens])).logits[0].float() / temperature
    log_p = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return log_p.gather(-1, torch.tensor(tokens)[:, None])[:, 0]


def changed_weights(server, factor=1.5):
    return {name: (tensor * factor).clone() for name, tensor in server._model.state_dict().items()}


def batch_sizes(server):
    """A list that grows by the rows of each decode step."""
    sizes, advance = [], server._batch.advance

    def counted(joining, version):
        sizes.append(len(server._batch.rows) + len(joining))
        return advance(joining, version)

    server._batch.advance = counted
    return sizes


async def in_flight(server, tokens):
    while not server._batch.rows or len(server._batch.rows[0].tokens) < tokens:
        await asyncio.sleep(0.002)


# ---- several requests at once ----


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_of_a_batch_are_those_of_a_plain_forward(server, temperature):
    outputs = generated(server, PROMPTS, WARM | {"temperature": temperature})
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.stop_reason == "completed"
        got = torch.tensor(output.log_probs)
        expected = plain_log_probs(server, prompt, output.token_ids, temperature)
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
        # The negative control: at another temperature, or after a prompt that starts elsewhere, they differ.
        assert (got - plain_log_probs(server, prompt, output.token_ids, 2 * temperature)).abs().max() > 1e-2
        assert (got - plain_log_probs(server, [3, *prompt], output.token_ids, temperature)).abs().max() > 1e-4


def test_greedy_requests_together_equal_each_alone(tiny, server):
    together = generated(server, PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, together, strict=True):
        (alone,) = generated(make_server(tiny), [prompt], GREEDY)
        assert output.token_ids == alone.token_ids
        torch.testing.assert_close(torch.tensor(output.log_probs), torch.tensor(alone.log_probs), atol=1e-5, rtol=0)
    assert len({tuple(output.token_ids) for output in together}) == 4  # equal prompts only are equal


def test_requests_join_and_leave_a_running_batch(tiny, server):
    """Two long requests, one that ends early, one that joins in the middle: each as if alone."""
    limits = [12, 3, 12, 8]

    def ask(place):
        params = GREEDY | {"max_tokens": limits[place], "ignore_eos": True}
        return asyncio.create_task(server.generate(PROMPTS[place], params, f"r{place}"))

    async def staggered():
        going = [ask(place) for place in range(3)]
        while len(server._batch.rows) != 3:
            await asyncio.sleep(0)
        while len(server._batch.rows) != 2:  # the short one has left
            await asyncio.sleep(0)
        going.append(ask(3))
        while len(server._batch.rows) != 3:
            await asyncio.sleep(0)
        return await asyncio.gather(*going)

    for place, output in enumerate(asyncio.run(staggered())):
        params = GREEDY | {"max_tokens": limits[place], "ignore_eos": True}
        (alone,) = generated(make_server(tiny), [PROMPTS[place]], params)
        assert len(output.token_ids) == limits[place]
        assert output.token_ids == alone.token_ids
    assert server._batch.rows == []


def test_requests_share_decode_steps(tiny):
    """Eight requests of 12 tokens take 12 steps of at least 0.05 s together, not 96."""
    slow = slow_server(tiny, 0.05)
    sizes = batch_sizes(slow)

    async def timed():
        start = asyncio.get_running_loop().time()
        await asyncio.gather(*[slow.generate(PROMPTS[k % 5], WARM, f"r{k}") for k in range(8)])
        return asyncio.get_running_loop().time() - start

    seconds = asyncio.run(timed())
    assert sizes == [8] * 12
    assert seconds >= 11 * 0.05  # nobody waits for the rest of the last step


def test_no_more_than_max_num_seqs_are_in_flight(tiny):
    narrow = make_server(tiny, max_num_seqs=2)
    sizes = batch_sizes(narrow)
    outputs = generated(narrow, PROMPTS, GREEDY)
    assert max(sizes) == 2
    assert [output.stop_reason for output in outputs] == ["completed"] * 5


def test_sampling_depends_on_seed_and_prompt_and_not_on_neighbours(tiny, server):
    together = [output.token_ids for output in generated(server, PROMPTS, WARM)]
    alone = make_server(tiny)
    assert [generated(alone, [prompt], WARM)[0].token_ids for prompt in PROMPTS] == together
    assert together[0] != together[2]  # the same prompt a second time is another sample
    other = generated(make_server(tiny, seed=7), PROMPTS, WARM)
    assert [output.token_ids for output in other] != together


def test_an_end_token_ends_the_response_and_stays_in_it(tiny, server):
    (free,) = generated(server, [PROMPTS[0]], GREEDY | {"ignore_eos": True})
    assert len(free.token_ids) == 12
    stop = free.token_ids[4]
    (ended,) = generated(make_server(tiny), [PROMPTS[0]], GREEDY | {"ignore_eos": True, "stop_token_ids": [stop]})
    assert ended.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    own_end = make_server(tiny)
    own_end._ends = frozenset([stop])
    assert generated(own_end, [PROMPTS[0]], GREEDY)[0].token_ids == ended.token_ids


def test_a_caller_that_leaves_takes_its_row_out_of_the_batch(tiny):
    slow = slow_server(tiny)

    async def cancelled():
        leaving, staying = (asyncio.create_task(slow.generate(PROMPTS[k], GREEDY, f"r{k}")) for k in (0, 1))
        await in_flight(slow, 3)
        leaving.cancel()
        while len(slow._batch.rows) != 1:
            await asyncio.sleep(0.002)
        return await staying

    assert len(asyncio.run(cancelled()).token_ids) == 12


# ---- abort, weights, versions ----


def test_abort_returns_what_is_there_with_its_version_and_resume_goes_on(tiny):
    slow = slow_server(tiny)

    async def interrupted():
        await slow.load_weights(slow._model.state_dict(), global_steps=3)
        going = [asyncio.create_task(slow.generate(PROMPTS[k], GREEDY, f"r{k}")) for k in (0, 1)]
        await in_flight(slow, 4)
        report = await slow.abort_all_requests()
        partial = await asyncio.gather(*going)
        late = asyncio.create_task(slow.generate(PROMPTS[1], GREEDY, "late"))
        await asyncio.sleep(0.05)
        assert not late.done()  # held until resume
        await slow.load_weights(slow._model.state_dict(), global_steps=4)
        await slow.resume_generation()
        rest = await asyncio.gather(
            *[
                slow.generate(PROMPTS[k] + output.token_ids, GREEDY | {"max_tokens": 12 - len(output.token_ids)}, "x")
                for k, output in enumerate(partial)
            ]
        )
        return report, partial, rest, await late

    report, partial, rest, late = asyncio.run(interrupted())
    assert report == {"aborted_count": 2, "request_ids": ["r0", "r1"]}
    for output in partial:
        assert output.stop_reason == "aborted"
        assert 4 <= len(output.token_ids) == len(output.log_probs) < 12
        assert output.extra_fields == {"global_steps": 3, "min_global_steps": 3, "max_global_steps": 3}
    assert late.extra_fields["global_steps"] == 4
    whole = generated(make_server(tiny, ignore_eos=True), PROMPTS[:2], GREEDY)
    for before, after, uninterrupted in zip(partial, rest, whole, strict=True):
        assert before.token_ids + after.token_ids == uninterrupted.token_ids
        assert after.extra_fields["global_steps"] == 4


def test_a_server_that_leaves_rotation_fails_new_requests(server):
    async def rejected():
        await server.abort_all_requests(reject_request=True)
        return await server.generate(PROMPTS[0], GREEDY, "r")

    output = asyncio.run(rejected())
    assert (output.stop_reason, output.token_ids) == ("aborted", [])


def test_loaded_weights_are_seen_by_the_next_tokens_and_stamped(server):
    before = generated(server, [PROMPTS[0]], GREEDY)[0]
    assert before.extra_fields["global_steps"] is None
    asyncio.run(server.load_weights(changed_weights(server), global_steps=1))
    after = generated(server, [PROMPTS[0]], GREEDY)[0]
    assert after.extra_fields["global_steps"] == 1
    assert after.log_probs != before.log_probs
    expected = plain_log_probs(server, PROMPTS[0], after.token_ids)
    torch.testing.assert_close(torch.tensor(after.log_probs), expected, atol=1e-5, rtol=0)


def test_weights_loaded_between_decode_steps_span_two_versions(tiny):
    slow = slow_server(tiny)

    async def published_in_flight():
        await slow.set_global_steps(1)
        going = asyncio.create_task(slow.generate(PROMPTS[0], GREEDY, "r"))
        await in_flight(slow, 4)
        await slow.load_weights(changed_weights(slow), global_steps=2)
        return await going

    output = asyncio.run(published_in_flight())
    assert output.extra_fields == {"global_steps": 2, "min_global_steps": 1, "max_global_steps": 2}
    assert len(output.token_ids) == 12


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda named: named.pop("model.norm.weight"), "missing"),
        (lambda named: named.update({"model.other": torch.zeros(1)}), "unknown"),
        (lambda named: named.update({"model.norm.weight": torch.zeros(3)}), "another shape"),
        (lambda named: named.update({"lm_head.weight": named["lm_head.weight"] + 1}), "tied here"),
    ],
)
def test_weights_that_do_not_fit_are_refused_whole(server, spoil, word):
    named = changed_weights(server)
    spoil(named)
    kept = {name: tensor.clone() for name, tensor in server._model.state_dict().items()}
    with pytest.raises(WorkerFailed, match=word):
        asyncio.run(server.load_weights(named, 9))
    assert all(torch.equal(kept[name], tensor) for name, tensor in server._model.state_dict().items())
    assert server._version is None


def test_tied_weights_may_come_under_one_name(server):
    named = changed_weights(server)
    del named["lm_head.weight"]
    asyncio.run(server.load_weights(named, 1))
    assert torch.equal(server._model.lm_head.weight, named["model.embed_tokens.weight"])


# ---- failures and refusals ----


def test_a_model_that_raises_fails_its_requests_and_not_the_server(server):
    advance = server._batch.advance

    def broken(joining, version):
        raise RuntimeError("boom")

    server._batch.advance = broken
    with pytest.raises(WorkerFailed, match="RuntimeError: boom"):
        generated(server, [PROMPTS[0]], GREEDY)
    server._batch.advance = advance
    assert generated(server, [PROMPTS[0]], GREEDY)[0].stop_reason == "completed"


@pytest.mark.parametrize(
    ("params", "more", "message"),
    [
        ({"min_p": 0.1}, {}, "min_p"),
        ({"repetition_penalty": 1.1}, {}, "repetition penalty"),
        ({"temperature": -1}, {}, "negative temperature"),
        ({"top_p": 0.0}, {}, "top_p"),
        ({}, {"image_data": ["an image"]}, "image_data"),
    ],
)
def test_what_is_not_honoured_is_refused(server, params, more, message):
    with pytest.raises(ConfigurationError, match=message):
        generated(server, [PROMPTS[0]], params, **more)


def test_a_prompt_that_fills_the_context_is_refused(server):
    with pytest.raises(ConfigurationError, match="no room"):
        generated(server, [[5] * 512], GREEDY)
    (last,) = generated(server, [[5] * 510], GREEDY | {"ignore_eos": True, "max_tokens": 12})
    assert len(last.token_ids) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_model_parallel_size": 2}, "tensor_model_parallel_size=1"),
        ({"quantization": "fp8"}, "quantization"),
        ({"logprobs_mode": "raw_logits"}, "raw_logits"),
        ({"engine_kwargs": {cpu.ROLLOUT: {"second_per_token": 1}}}, "seconds_per_token"),
        ({"engine_kwargs": {cpu.ROLLOUT: {"seconds_per_token": -1}}}, "isn't a time"),
    ],
)
def test_settings_that_are_not_honoured_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        check(rollout_config(**options))
