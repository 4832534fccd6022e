"""The rollout engine: what it samples is what the model says, whoever shares its slots and whenever weights change."""

import random

import pytest
import tiny_local
import torch

from metronome.errors import ConfigurationError
from metronome.shared_prompt.select import SharedPromptAttention
from metronome_local.engine import Continuation
from metronome_local.logprobs import SeparateLogProbs, SharedPromptLogProbs
from metronome_local.rollouts import Prompt, Row, Sampled, calculator

TOKENIZER = tiny_local.tokenizer()
PROMPTS = [tuple(TOKENIZER.encode(text)) for text in ("say one two three", "count?", "u:9 + 3 =\na:")]
CONTEXTS = [PROMPTS[0]] * 3 + [PROMPTS[1]] * 2 + [PROMPTS[2]]
SEEDS = [f"{place} of the test" for place in range(6)]
SLIDING = {"head_dim": 8, "sliding_window": 6}
MODELS = {
    "llama": {},
    "qwen3": {"head_dim": 8},
    "mistral": SLIDING,
    "gemma3_text": {
        **SLIDING,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
EAGER = {
    "gemma2": {**SLIDING, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gpt_oss": {
        **SLIDING,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}


def log_probs_of(made, shared, temperature=1.0):
    if shared:
        return SharedPromptLogProbs(made, SharedPromptAttention(), temperature, "float32")
    return SeparateLogProbs(made, temperature, "float32")


def groups_of(rows):
    return [rows[:3], rows[3:5], rows[5:]]


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
@pytest.mark.parametrize("kind", MODELS)
def test_the_engines_log_probs_are_the_training_forwards(kind, shared):
    made = tiny_local.model(kind, **MODELS[kind])
    samples = tiny_local.sample(tiny_local.engine(made, temperature=0.7), CONTEXTS, SEEDS, 12)
    rows = tiny_local.rows_of(CONTEXTS, samples)
    sampled = torch.tensor([p for row in rows for p in row.log_probs])
    trained, _ = log_probs_of(made, shared, 0.7)(groups_of(rows))
    assert (trained - sampled).abs().max() < 1e-4
    other, _ = log_probs_of(made, shared, 1.0)(groups_of(rows))
    assert (other - sampled).abs().max() > 1e-2  # another temperature is another policy


@pytest.mark.parametrize("kind", EAGER)
def test_a_model_with_eager_attention_alone_is_decoded_as_its_own_forward(kind):
    made = tiny_local.model(kind, **EAGER[kind])
    assert made.config._attn_implementation == "eager"
    rows = tiny_local.rows_of(CONTEXTS, tiny_local.sample(tiny_local.engine(made), CONTEXTS, SEEDS, 12))
    sampled = torch.tensor([p for row in rows for p in row.log_probs])
    assert (log_probs_of(made, False)(groups_of(rows))[0] - sampled).abs().max() < 1e-4


@pytest.mark.parametrize("kind", ["mistral", "gemma3_text"])
def test_a_window_longer_than_the_row_is_another_model(kind):
    made = tiny_local.model(kind, **MODELS[kind])
    rows = tiny_local.rows_of(CONTEXTS, tiny_local.sample(tiny_local.engine(made), CONTEXTS, SEEDS, 12))
    sampled = torch.tensor([p for row in rows for p in row.log_probs])
    wide = tiny_local.model(kind, **{**MODELS[kind], "sliding_window": 200})
    wide.load_state_dict(made.state_dict())
    trained, _ = log_probs_of(wide, False)(groups_of(rows))
    assert (trained - sampled).abs().max() > 1e-2


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_samples_depend_on_neither_slots_nor_neighbours(slots):
    made = tiny_local.model()
    wide = tiny_local.sample(tiny_local.engine(made, 32), CONTEXTS, SEEDS, 12)
    narrow = tiny_local.sample(tiny_local.engine(made, slots), CONTEXTS, SEEDS, 12)
    assert {key: one.ids for key, one in wide.items()} == {key: one.ids for key, one in narrow.items()}
    alone = tiny_local.sample(tiny_local.engine(made), CONTEXTS[4:5], SEEDS[4:5], 12)
    assert alone[0].ids == wide[4].ids
    reseeded = tiny_local.sample(tiny_local.engine(made, 32), CONTEXTS, SEEDS[1:] + SEEDS[:1], 12)
    assert reseeded[4].ids != wide[4].ids


def test_sampling_follows_the_models_distribution():
    made = tiny_local.model()
    context = PROMPTS[1]
    wanted = made(input_ids=torch.tensor([context])).logits[0, -1].softmax(-1)
    count = 4000
    drawn = tiny_local.sample(tiny_local.engine(made, 64), [context] * count, range(count), max_tokens=1)
    found = torch.bincount(torch.tensor([one.ids[0] for one in drawn.values()]), minlength=len(wanted)) / count
    deviation = (wanted * (1 - wanted) / count).sqrt()
    assert ((found - wanted).abs() / deviation.clamp_min(1e-4)).max() < 5
    assert (found - wanted.roll(1)).abs().max() > 5 * deviation.max()


def test_a_prompt_is_prefilled_once_for_its_group():
    made = tiny_local.model()
    widths = []
    made.register_forward_pre_hook(
        lambda _module, _arguments, options: widths.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    tiny_local.sample(tiny_local.engine(made, slots=2), CONTEXTS, SEEDS)
    assert [width for width in widths if width > 1] == [len(prompt) for prompt in PROMPTS]


def test_greedy_takes_the_likeliest_token_whatever_the_seed():
    made = tiny_local.model()
    context, seeds = PROMPTS[0], [1, 2]
    found = tiny_local.sample(tiny_local.engine(made), [context] * 2, seeds, greedy=True)
    ids = list(context)
    for _ in range(8):
        ids.append(int(made(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    assert found[0].ids == found[1].ids == ids[len(context) :]
    drawn = tiny_local.sample(tiny_local.engine(made), [context] * 2, seeds)
    assert drawn[0].ids != drawn[1].ids


def test_a_sequence_ends_at_the_end_token_or_is_truncated_at_the_limit():
    made = tiny_local.model()
    free = tiny_local.sample(tiny_local.engine(made), CONTEXTS, SEEDS, 12)
    assert all(len(one.ids) == 12 and one.truncated for one in free.values())
    end = free[0].ids[4]
    ended = tiny_local.sample(tiny_local.engine(made, eos=[end]), CONTEXTS, SEEDS, 12)
    for key, one in ended.items():
        wanted = free[key].ids
        cut = wanted.index(end) + 1 if end in wanted else 12
        assert one.ids == wanted[:cut]
        assert one.truncated == (end not in wanted)
        assert len(one.log_probs) == len(one.versions) == cut
    assert not ended[0].truncated
    ignored = tiny_local.sample(tiny_local.engine(made, eos=[end]), CONTEXTS, SEEDS, 12, ignore_eos=True)
    assert [ignored[key].ids for key in free] == [free[key].ids for key in free]
    assert not any(one.truncated for one in ignored.values())


def test_an_aborted_sequence_is_forgotten_and_the_others_go_on_unchanged():
    made = tiny_local.model()
    whole = tiny_local.sample(tiny_local.engine(made), CONTEXTS, SEEDS, 12)
    running = tiny_local.engine(made, slots=3)
    for key, (context, seed) in enumerate(zip(CONTEXTS, SEEDS, strict=True)):
        running.submit(Continuation(key, context, 12, random.Random(seed)))
    for _ in range(5):
        assert not running.step()
    running.abort({0, 4})  # one in a slot, one that waits
    found = {}
    while running.busy:
        found.update(running.step())
    assert {key: one.ids for key, one in found.items()} == {
        key: one.ids for key, one in whole.items() if key not in (0, 4)
    }


def halfway(made, other, renewed):
    """Five tokens of ``made``, then the weights of ``other``; ``renewed`` False leaves keys and values stale."""
    running = tiny_local.engine(made, slots=4)
    for key, (context, seed) in enumerate(zip(CONTEXTS, SEEDS, strict=True)):
        running.submit(Continuation(key, context, 12, random.Random(seed)))
    for _ in range(5):
        running.step()
    made.load_state_dict(other.state_dict())
    if renewed:
        running.renew(version=3)
    else:
        running.version = 3
    found = {}
    while running.busy:
        found.update(running.step())
    return tiny_local.rows_of(CONTEXTS, found)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_after_new_weights_the_rest_is_sampled_from_them_alone(kind):
    def difference(renewed):
        made, other = tiny_local.model(kind, **MODELS[kind]), tiny_local.model(kind, 7, **MODELS[kind])
        rows = halfway(made, other, renewed)
        values = log_probs_of(other, False)(groups_of(rows))[0].split([12] * len(rows))
        gaps = []
        for row, value in zip(rows, values, strict=True):
            old = row.versions.count(0)
            assert row.versions == [0] * old + [3] * (12 - old)
            gaps.append((value - torch.tensor(row.log_probs))[old:].abs().max().item())
        assert [row.versions.count(0) for row in rows[:4]] == [6] * 4
        assert [row.versions.count(0) for row in rows[4:]] == [0] * 2
        before = tiny_local.model(kind, **MODELS[kind])
        values = log_probs_of(before, False)(groups_of(rows))[0].split([12] * len(rows))
        for row, value in zip(rows[:4], values[:4], strict=True):
            assert (value - torch.tensor(row.log_probs))[:6].abs().max() < 1e-4
        return max(gaps)

    assert difference(renewed=True) < 1e-4
    assert difference(renewed=False) > 1e-2


def converse(rollout, texts, version=2):
    asked = []
    try:
        request = next(rollout)
        for text in texts:
            asked.append(tuple(request.ids))
            ids = TOKENIZER.encode(text)
            request = rollout.send(Sampled(ids, [-0.5] * len(ids), [version] * len(ids), False))
    except StopIteration as stop:
        return stop.value, asked
    raise AssertionError(f"the rollout asks for more after {asked}")


def test_a_tools_tokens_stand_in_the_context_and_out_of_the_loss():
    prompt = Prompt(0, PROMPTS[1], "count?")
    rows, asked = converse(calculator(prompt, TOKENIZER), ["<calc>2 * 21</calc>", "42!"])
    (row,) = rows
    spoken, result, answer = (TOKENIZER.encode(text) for text in ("<calc>2 * 21</calc>", " = 42\n", "42!"))
    assert row.response == spoken + result + answer
    assert row.trained == [True] * len(spoken) + [False] * len(result) + [True] * len(answer)
    assert row.versions == [2] * len(spoken) + [-1] * len(result) + [2] * len(answer)
    assert row.log_probs == [-0.5] * len(spoken) + [0.0] * len(result) + [-0.5] * len(answer)
    assert asked == [PROMPTS[1], PROMPTS[1] + tuple(spoken + result)]


@pytest.mark.parametrize(
    "call, answer",
    [("7/2", "3.5"), ("1/0", "error"), ("2**9", "error"), ("(1+2)*-3", "-9"), ("((", "error")],
)
def test_the_calculator_answers_arithmetic_and_nothing_else(call, answer):
    rows, _ = converse(calculator(Prompt(0, PROMPTS[1], ""), TOKENIZER), [f"<calc>{call}</calc>", "."])
    assert f"</calc> = {answer}\n." in TOKENIZER.decode(rows[0].response)


def test_a_conversation_through_the_engine_has_the_log_probs_of_its_whole_context():
    made = tiny_local.model()
    running, rng = tiny_local.engine(made), random.Random(1)
    row, tool = Row(list(PROMPTS[0])), TOKENIZER.encode(" = 42\n")
    for turn in range(2):
        running.submit(Continuation((0, turn), tuple(row.ids), 5, rng))
        found = []
        while not found:
            found = running.step()
        row.add_sampled(found[0][1])
        if turn == 0:
            row.add_tool(tool)
    values, _ = log_probs_of(made, True)([[row]])
    gap = (values - torch.tensor(row.log_probs)).abs()[torch.tensor(row.trained)]
    assert len(gap) == 10
    assert gap.max() < 1e-4
    row.response[5 : 5 + len(tool)] = TOKENIZER.encode(" = 17\n")
    values, _ = log_probs_of(made, True)([[row]])
    assert (values - torch.tensor(row.log_probs)).abs()[5 + len(tool) :].max() > 1e-3


@pytest.mark.parametrize(
    "kind, options",
    [
        ("mamba", {}),
        ("falcon_h1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8}),
        ("rwkv", {}),
        ("mpt", {"n_layers": 2, "n_heads": 4, "d_model": 32}),
        ("bloom", {"n_layer": 2, "n_head": 4}),
        ("gpt_neo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}),
    ],
)
def test_a_model_with_states_or_an_attention_of_its_own_is_refused_by_the_engine(kind, options):
    made = tiny_local.model(kind, **options)
    with pytest.raises(ConfigurationError, match=r"every layer is full or sliding attention.*model\.name"):
        tiny_local.engine(made)
