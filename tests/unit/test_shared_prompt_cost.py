"""The theory of shared prompts, against the figures of the table and a count by hand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from metronome.errors import ConfigurationError
from metronome.shared_prompt.cost import attention_ratio, causal_pairs, token_ratio


@pytest.mark.parametrize(
    ("prompt", "response", "attention", "tokens"),
    [
        (16384, 64, 7.59, 7.79),
        (16384, 1024, 4.45, 5.67),
        (1024, 1024, 1.28, 1.78),
        (128, 1024, 1.01, 1.11),
    ],
)
def test_ratios_of_eight_responses_are_those_of_the_table(prompt, response, attention, tokens):
    assert attention_ratio(prompt, [response] * 8) == pytest.approx(attention, abs=0.005)
    assert token_ratio(prompt, [response] * 8) == pytest.approx(tokens, abs=0.005)


def test_attention_ratio_counts_the_pairs_of_uneven_responses():
    prompt, responses = 3, [2, 0, 4]
    separate = sum(sum(range(1, prompt + length + 1)) for length in responses)
    shared = sum(range(1, prompt + 1)) + sum(sum(prompt + j for j in range(1, n + 1)) for n in responses)
    assert attention_ratio(prompt, responses) == separate / shared
    assert causal_pairs(4) == 10


def test_one_response_gains_nothing():
    assert attention_ratio(100, [50]) == 1.0
    assert token_ratio(100, [50]) == 1.0


@pytest.mark.parametrize(("prompt", "responses"), [(0, [1]), (1, []), (1, [-1])])
def test_impossible_groups_are_refused(prompt, responses):
    with pytest.raises(ConfigurationError, match="at least one token"):
        token_ratio(prompt, responses)


def test_theory_and_plugin_need_no_torch():
    code = (
        "import sys; import metronome.shared_prompt.cost, metronome.shared_prompt.layout;"
        "from metronome.shared_prompt import plugin; plugin.describe(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_table_in_the_documentation_is_what_the_formulas_give():
    text = (Path(__file__).parents[2] / "docs/techniques/shared_prompt.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", text, flags=re.MULTILINE)
    assert len(rows) >= 4
    for prompt, response, count, attention, tokens in rows:
        lengths = [int(response)] * int(count)
        assert f"{attention_ratio(int(prompt), lengths):.2f}" == attention
        assert f"{token_ratio(int(prompt), lengths):.2f}" == tokens
