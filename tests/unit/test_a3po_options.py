"""Options of the losses, what the plug-in offers, and the meter: all without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from metronome.a3po import plugin
from metronome.a3po.metrics import Meter
from metronome.a3po.options import A3poOptions, PpoOptions
from metronome.errors import ConfigurationError
from metronome.settings import parse_options

MODELS = {"a3po": A3poOptions, "ppo": PpoOptions}

BAD = [
    ("a3po", {"proximal": "linear"}, "metronome.a3po.proximal", "'loglinear', 'recompute', 'reuse' or"),
    ("a3po", {"fresh": "old"}, "metronome.a3po.fresh", "'behavior' or 'target'"),
    ("a3po", {"clip_low": 0}, "metronome.a3po.clip_low", "between 0 and 1"),
    ("a3po", {"clip_low": 1.0}, "metronome.a3po.clip_low", "between 0 and 1"),
    ("a3po", {"clip_low": float("nan")}, "metronome.a3po.clip_low", "between 0 and 1"),
    ("a3po", {"clip_high": -0.2}, "metronome.a3po.clip_high", "above 0"),
    ("a3po", {"clip_high": float("inf")}, "metronome.a3po.clip_high", "above 0"),
    ("a3po", {"cap": 0.5}, "metronome.a3po.cap", "null for none"),
    ("a3po", {"cap": float("inf")}, "metronome.a3po.cap", "null for none"),
    ("a3po", {"cap_mode": "clip"}, "metronome.a3po.cap_mode", "'mask' or 'truncate'"),
    ("a3po", {"dual_clip": 1.0}, "metronome.a3po.dual_clip", "above 1"),
    ("a3po", {"importance_weight": False, "cap": 4.0}, "metronome.a3po", "remove cap, or"),
    ("a3po", {"importance_weight": "perhaps"}, "metronome.a3po.importance_weight", "importance_weight: true or false"),
    ("a3po", {"proximal": "reuse", "fresh": "target"}, "metronome.a3po", "remove fresh, or set proximal: loglinear"),
    ("a3po", {"proximal": "behavior", "fresh": "target"}, "metronome.a3po", "remove fresh"),
    ("a3po", {"proximal": "behavior", "cap": 4.0}, "metronome.a3po", "remove cap, or"),
    ("a3po", {"proximal": "behavior", "cap_mode": "truncate"}, "metronome.a3po", "remove cap_mode, or"),
    ("a3po", {"proximal": "behavior", "importance_weight": False}, "metronome.a3po", "remove importance_weight, or"),
    ("a3po", {"cap": None, "cap_mode": "truncate"}, "metronome.a3po", "remove cap_mode, or set cap: 5.0"),
    ("a3po", {"importance_weight": False, "cap_mode": "truncate"}, "metronome.a3po", "importance_weight: true"),
    ("a3po", {"clip_hi": 0.2}, "metronome.a3po", "use 'clip_high'"),
    ("ppo", {"clip_low": "wide"}, "metronome.ppo.clip_low", "number"),
    ("ppo", {"dual_clip": 0.9}, "metronome.ppo.dual_clip", "above 1"),
    ("ppo", {"anchor": "oldest"}, "metronome.ppo.anchor", "'old' or 'behavior'"),
    ("ppo", {"proximal": "reuse"}, "metronome.ppo", "use one of"),
]


@pytest.mark.parametrize("name, values, where, remedy", BAD, ids=[f"{n} {v}" for n, v, _, _ in BAD])
def test_a_bad_option_is_one_line_with_place_and_remedy(name, values, where, remedy):
    with pytest.raises(ConfigurationError) as caught:
        plugin.policy_loss(name, values)
    assert caught.value.where == where
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"cap": None, "importance_weight": False},
        {"importance_weight": False},
        {"cap": 1, "cap_mode": "truncate", "dual_clip": 3},
        {"clip_low": 0.4, "clip_high": 0.6, "proximal": "reuse", "cap": 2, "strict": False},
        {"proximal": "loglinear", "fresh": "target", "cap_mode": "truncate", "importance_weight": True},
        {"proximal": "behavior", "dual_clip": 3},
    ],
    ids=str,
)
def test_good_options_are_kept(values):
    options = parse_options(A3poOptions, values, where="metronome.a3po")
    assert {key: getattr(options, key) for key in values} == values


def test_every_offer_lists_every_option_with_its_default():
    offers = {offer.name: offer for offer in plugin.describe()}
    assert offers.keys() == MODELS.keys()
    for name, offer in offers.items():
        assert offer.hook == "policy_loss"
        assert offer.options == {key: field.default for key, field in MODELS[name].model_fields.items()}
    assert offers["a3po"].options["cap"] == 5.0
    assert offers["a3po"].options["cap_mode"] == "mask"


def test_another_plugins_name_is_left_to_it():
    assert plugin.policy_loss("grpo", {"anything": 1}) is None


def test_bad_options_and_the_offers_need_no_torch():
    code = (
        "import sys\n"
        "from metronome.a3po import metrics, plugin\n"
        "plugin.describe(), metrics.Meter().result()\n"
        "try: plugin.policy_loss('a3po', {'cap': 0})\n"
        "except Exception as error: assert type(error).__name__ == 'ConfigurationError', error\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_meter_gives_means_of_sums_and_maxima_for_any_split():
    whole, parts = Meter(), Meter()
    whole.add({"ratio": (6.0, 4.0), "staleness": (3.0, 2.0)}, {"ratio": 2.5})
    parts.add({"ratio": (1.0, 1.0), "staleness": (0.0, 0.0)}, {"ratio": 1.0})
    parts.add({"ratio": (5.0, 3.0), "staleness": (3.0, 2.0)}, {"ratio": 2.5})
    assert whole.result() == parts.result() == {"ratio": 1.5, "staleness": 1.5, "ratio_max": 2.5}
    mean_of_means = (1.0 / 1 + 5.0 / 3) / 2
    assert mean_of_means != pytest.approx(1.5)


def test_meters_of_several_ranks_merge():
    one, other = Meter(), Meter()
    one.add({"capped": (1.0, 4.0)}, {"ratio": -1.0})
    other.add({"capped": (0.0, 4.0)}, {})
    one.add(other.sums, other.maxima)
    assert one.result() == {"capped": 0.125, "ratio_max": -1.0}


def test_the_meter_leaves_out_what_was_never_counted():
    meter = Meter()
    meter.add({"staleness": (0.0, 0.0)}, {})
    assert meter.result() == {}


@pytest.mark.parametrize("name", ["a3po", "ppo"])
def test_every_default_may_be_written_out(name):
    (offer,) = [offer for offer in plugin.describe() if offer.name == name]
    assert parse_options(MODELS[name], offer.options, "metronome") == MODELS[name]()
