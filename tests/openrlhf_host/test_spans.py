"""Versions per token are read off a finished response by its tokens, whatever an agent did between them."""

import pytest

pytest.importorskip("openrlhf", reason="the OpenRLHF adapter's tests need OpenRLHF (requirements/openrlhf.txt)")

from metronome_openrlhf.spans import UNKNOWN, Request, spans_of


def request(tokens, *spans):
    return Request(seen=len(tokens), spans=[list(one) for one in spans], tokens=list(tokens))


def response(*parts):
    """Observations and, as lists, actions."""
    tokens, ranges = [], []
    for part in parts:
        if isinstance(part, list):
            ranges.append((len(tokens), len(tokens) + len(part)))
        tokens += part
    return {"observation_tokens": tokens, "action_ranges": ranges}


def test_turns_follow_each_other():
    asked = [request([5, 6, 7], (0, 2), (1, 1)), request([8, 9], (1, 2))]
    assert spans_of(response((1, 2), [5, 6, 7], (3, 4), [8, 9]), asked) == [[0, 2], [1, 3]]


def test_a_cut_turn_keeps_the_versions_of_what_is_left():
    asked = [request([5, 6, 7, 8], (3, 2), (4, 2))]
    assert spans_of(response((1,), [5, 6, 7]), asked) == [[3, 2], [4, 1]]
    assert spans_of(response((1,), [5]), asked) == [[3, 1]]


def test_a_turn_that_was_thrown_away_counts_for_nothing():
    asked = [request([5, 5], (0, 2)), request([6, 6], (1, 2)), request([7], (2, 1))]
    assert spans_of(response((1,), [6, 6], (2,), [7]), asked) == [[1, 2], [2, 1]]


def test_equal_turns_are_taken_in_the_order_in_which_they_were_asked():
    asked = [request([5], (0, 1)), request([5], (1, 1))]
    assert spans_of(response((1,), [5], (2,), [5]), asked) == [[0, 1], [1, 1]]


def test_turns_that_were_asked_together_may_stand_in_any_order():
    asked = [request([5], (0, 1)), request([6], (1, 1))]
    assert spans_of(response((1,), [6], (2,), [5]), asked) == [[1, 1], [0, 1]]


def test_tokens_that_no_request_returned_are_unknown():
    asked = [request([5, 6], (0, 2))]
    assert spans_of(response((1,), [5, 7, 8]), asked) == [[UNKNOWN, 3]]
    assert spans_of(response((1,), [5, 6], (2,), [9]), asked) == [[0, 2], [UNKNOWN, 1]]


def test_tokens_are_accounted_to_the_version_that_was_there_when_they_came():
    one = Request()
    one.account(0)  # nothing has come yet
    one.seen = 3
    one.account(0)
    one.account(1)  # nothing new
    one.seen = 4
    one.account(1)
    one.seen = 6
    one.account(1)
    assert one.spans == [[0, 3], [1, 3]]
