"""docs/techniques/families.md is what the code does: each family is served exactly, or refused with its reason."""

import re

import pytest
import torch

pytest.importorskip("transformers")

import model_families as families
from family_configs import REFUSED, SERVED

from metronome.errors import ConfigurationError
from metronome.shared_prompt import huggingface
from metronome.shared_prompt.options import SharedPromptOptions

_TRIED = {}


def tried(family):
    """The trials in float64 (with negative controls) and float32, once for all tests."""
    if family.name not in _TRIED:
        double = families.attempt(family, controls=True)
        single = families.attempt(family, torch.float32) if double.refused is None else None
        _TRIED[family.name] = double, single
    return _TRIED[family.name]


@pytest.mark.parametrize("family", SERVED, ids=lambda family: family.name)
def test_a_served_family_gives_the_log_probs_and_gradients_of_separate_rows(family):
    double, single = tried(family)
    assert double.refused is None
    measured, limits = families.figures(double, single), families.limits(family)
    assert all(figure <= limit for figure, limit in zip(measured, limits, strict=True)), measured
    # negative controls: the comparison sees a wrong layout in this family
    assert double.restarted > 1e-2 > 100 * double.log_probs
    assert double.masked > 1e-2
    # a training pass updates nothing on its own, routing biases included
    assert double.changed_buffers == single.changed_buffers == ()


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.name)
def test_a_refused_family_says_what_where_and_what_mends_it(family):
    error = tried(family)[0].refused
    assert error is not None
    assert all((error.what.partition(": ")[2], error.where, error.remedy))


WRONG = (
    *("qwen3_next", "minimax", "mamba2", "falcon_h1", "recurrent_gemma", "lfm2", "zaya"),
    *("nemotron", "stablelm", "bert, decoder", "phimoe"),
    *("mixtral, jitter", "opt, dropout", "phi3, longrope", "llama, dynamic", "hyperclovax, scaled"),
)


@pytest.mark.parametrize("name", WRONG)
def test_without_the_refusal_the_result_would_be_wrong(name, monkeypatch):
    monkeypatch.setattr(huggingface, "refusal", lambda *_: None)
    monkeypatch.setattr(huggingface.SharedPromptModel, "_check_layers", lambda *_: None)
    (family,) = (one for one in REFUSED if one.name == name)
    model = families.build(family)
    plan, tokens, rows = families.row()
    with torch.no_grad():
        wanted = families.separate_log_probs(model, rows)
        shared = huggingface.attach(model, families.SharedPromptAttention(), SharedPromptOptions(self_check=False))
        assert (shared.log_probs(tokens, plan)[0] - wanted).abs().max() > 5e-3


@pytest.mark.parametrize(
    ("name", "words"),
    [("deepseek_v32", "indices"), ("minimax_m3_vl_text", "block_indices"), ("doge", "a mask of its own")],
)
def test_what_a_layer_would_tell_attention_in_vain_is_refused_by_the_layer_too(name, words, monkeypatch):
    monkeypatch.setattr(huggingface, "refusal", lambda *_: None)
    (family,) = (one for one in REFUSED if one.name == name)
    plan, tokens, _ = families.row()
    unchecked = SharedPromptOptions(self_check=False)
    shared = huggingface.attach(families.build(family), families.SharedPromptAttention(), unchecked)
    with pytest.raises(ConfigurationError, match=words):
        shared.log_probs(tokens, plan)


def test_at_least_twenty_families_are_served():
    assert len({type(families.build(family)) for family in SERVED}) >= 20


FIGURE = r"(?<= )\de-\d+(?= )"


def test_the_page_is_what_the_code_does():
    rows = [families.cells(family, *tried(family)) for family in families.FAMILIES]
    served = [row for row in rows if row[2] == "yes"]
    found = families.page(served, [row for row in rows if row[2] != "yes"])
    written = families.PAGE.read_text(encoding="utf-8")
    again = "python tests/hosts/model_families.py --write"
    assert re.sub(FIGURE, "*", written) == re.sub(FIGURE, "*", found), again
    lines = {line.split(" | ")[0][2:]: re.findall(FIGURE, line) for line in written.splitlines() if "| cascade" in line}
    for family in SERVED:
        for figure, bound in zip(families.figures(*tried(family)), lines[family.name], strict=True):
            assert figure <= float(bound), again


def test_a_routing_bias_decides_so_that_holding_it_still_means_something():
    (family,) = (one for one in SERVED if one.name == "deepseek_v3")
    model = families.build(family)
    tokens = families.row()[1][None]
    with torch.no_grad():
        before = model(input_ids=tokens, use_cache=False).logits
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.mul_(-1)
        assert (model(input_ids=tokens, use_cache=False).logits - before).abs().max() > 1e-3
