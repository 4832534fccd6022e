"""The CPU room's sampler: the distributions that it draws from, and the log-probs that it reports."""

import pytest

pytest.importorskip("verl", reason="the verl adapter's tests need verl (requirements/verl.txt)")

import torch

from metronome.decoding.sampling import choose
from metronome_verl.cpu.sampling import parse

PROBABILITIES = [0.4, 0.3, 0.2, 0.1]


def frequencies(params, draws=4000, processed=True):
    logits = torch.log(torch.tensor(PROBABILITIES))
    sampling = parse(params, max_tokens=1, stop=frozenset(), ignore_eos=False)
    generator = torch.Generator().manual_seed(0)
    counts, log_probs = torch.zeros(4), {}
    for _ in range(draws):
        token, log_probs[token] = choose(logits, sampling, generator, processed)
        counts[token] += 1
    return counts / draws, log_probs


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.75}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_p": 0.6999}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),  # 0.4/0.9 < 0.5: the second token crosses it
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"temperature": 0}, [1, 0, 0, 0]),
    ],
)
def test_temperature_top_k_and_top_p_draw_from_their_distribution(params, kept):
    drawn, log_probs = frequencies(params)
    torch.testing.assert_close(drawn, torch.tensor(kept, dtype=torch.float32), atol=0.03, rtol=0)
    assert {token for token, share in enumerate(kept) if share} == set(log_probs)
    if params.get("temperature") == 0:
        kept = PROBABILITIES  # a choice without a draw reports the model's own probability
    for token, log_prob in log_probs.items():
        assert log_prob == pytest.approx(torch.log(torch.tensor(kept[token])).item(), abs=1e-5)


def test_raw_log_probs_are_those_before_temperature_and_cuts():
    _, log_probs = frequencies({"temperature": 0.5, "top_k": 2}, processed=False)
    assert set(log_probs) == {0, 1}
    for token, log_prob in log_probs.items():
        assert log_prob == pytest.approx(torch.log(torch.tensor(PROBABILITIES[token])).item(), abs=1e-5)
