"""A warning raised in our own packages fails a test; a stranger's doesn't."""

from __future__ import annotations

import warnings

import pytest


def warn_in(module: str) -> None:
    exec("import warnings; warnings.warn('old', DeprecationWarning)", {"__name__": module})


@pytest.mark.parametrize("module", ["metronome", "metronome.periodic.sources", "metronome_local.host"])
def test_a_warning_in_our_packages_is_an_error(module: str) -> None:
    with pytest.raises(DeprecationWarning, match="old"):
        warn_in(module)


def test_a_warning_elsewhere_is_only_a_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warn_in("somebody_else")
    assert [str(one.message) for one in caught] == ["old"]
