"""Our flags are taken out of OpenRLHF's command line in every form, and a bad one says what to write instead."""

import pytest

from metronome.errors import ConfigurationError
from metronome_openrlhf.command import flags_of
from metronome_openrlhf.flags import take

EVERY_KIND = {
    "loss": "a3po",
    "a3po.cap": 5.0,
    "a3po.dual_clip": None,
    "sagc.sizes": [4, 8, 16],
    "fixed.size": -1,
    "other.text": "1e-6",
    "other.word": "true",
    "other.sentence": "it's a b: {c} # d",
    "other.empty": "",
    "other.off": False,
    "other.mapping": {"a": [1, "b"], "c": None},
}


def nested(flat):
    block = {}
    for key, value in flat.items():
        head, _, tail = key.partition(".")
        if tail:
            block.setdefault(head, {})[tail] = value
        else:
            block[head] = value
    return block


def test_a_value_is_the_next_argument_or_stands_behind_an_equals_sign():
    block, rest = take(
        ["--metronome.loss", "a3po", "--metronome.a3po.cap=5", "--metronome.sagc.sizes", "[4, 8]", "--metronome.x="]
    )
    assert block == {"loss": "a3po", "a3po": {"cap": 5}, "sagc": {"sizes": [4, 8]}, "x": None}
    assert rest == []


def test_a_flag_without_a_value_is_true():
    assert take(["--metronome.cpu", "--metronome.loss", "ppo", "--metronome.last"]) == (
        {"cpu": True, "loss": "ppo", "last": True},
        [],
    )


def test_a_value_may_be_negative():
    assert take(["--metronome.a", "-1", "--metronome.b=--c"])[0] == {"a": -1, "b": "--c"}


def test_what_is_openrlhf_s_stays_in_its_order():
    theirs = ["--train.batch_size", "8", "positional", "--reward.clip_range", "-1", "1", "--ds.zpg=2"]
    assert take([*theirs[:2], "--metronome.loss=ppo", *theirs[2:]]) == ({"loss": "ppo"}, theirs)


def test_numbers_written_with_an_exponent_are_numbers():
    assert take(["--metronome.sagc.delta", "4e-1"])[0]["sagc"] == {"delta": 0.4}


@pytest.mark.parametrize("flat", [EVERY_KIND])
def test_what_a_recipe_writes_is_read_back_as_it_was(flat):
    block, rest = take(flags_of({}, flat))
    assert block == nested(flat)
    assert rest == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--metronome.loss", "ppo", "--metronome.loss=a3po"], r"twice; found 'ppo'; in --metronome\.loss; .*once"),
        (
            ["--metronome.a3po", "5", "--metronome.a3po.cap", "5"],
            r"a value and options below it; found 5; in --metronome\.a3po; to mend: leave --metronome\.a3po out, or",
        ),
        (
            ["--metronome.a3po.cap", "5", "--metronome.a3po", "7"],
            r"a value and options.*found 7; in --metronome\.a3po;",
        ),
        (["--metronome.a.b", "1", "--metronome.a.b.c", "2"], r"in --metronome\.a\.b; to mend: leave --metronome\.a\.b"),
        (["--metronom.loss", "ppo"], r"neither a flag.*found '--metronom\.loss'.*--metronome\.loss VALUE"),
        (["--metronome-loss=ppo"], r"neither a flag.*to mend: --metronome\.KEY VALUE"),
        (["--metronome.sagc.sizes", "[4, 8"], r"not valid YAML.*--metronome\.sagc\.sizes.*to mend"),
    ],
)
def test_a_flag_that_contradicts_another_or_doesn_t_parse_is_refused(arguments, words):
    with pytest.raises(ConfigurationError, match=words) as refused:
        take(arguments)
    assert refused.value.exit_code == 2


def test_openrlhf_s_flags_keep_their_values():
    args = {
        "a.on": True,
        "a.off": False,
        "a.left": None,
        "a.rate": 1e-6,
        "a.range": [-10, 10],
        "a.text": "a b",
        "a.negative": -0.5,
        "a.empty": "",
    }
    assert flags_of(args, {}) == [
        "--a.on",
        *("--a.rate", "1e-06", "--a.range", "-10", "10", "--a.text", "a b", "--a.negative=-0.5", "--a.empty", ""),
    ]
    with pytest.raises(ConfigurationError, match=r"no mapping.*args\.a"):
        flags_of({"a": {}}, {})
