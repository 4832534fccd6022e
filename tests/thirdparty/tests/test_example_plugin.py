"""The package's own tests: both objects keep the contracts of their hooks."""

from metronome.testing.group_controller import check_group_controller
from metronome.testing.policy_loss import check_policy_loss
from metronome_example.alternating import Alternating
from metronome_example.reinforce import Reinforce


def test_the_loss_keeps_the_contract():
    check_policy_loss(Reinforce(cap=3.0))


def test_the_controller_keeps_the_contract():
    check_group_controller(Alternating((4, 8, 2)), make=lambda: Alternating((4, 8, 2)))
