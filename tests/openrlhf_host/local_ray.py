"""As much of Ray as OpenRLHF's controller calls, in one process: calls run at once, results wait to be asked for."""

import random
import sys
from types import SimpleNamespace


class Ref:
    """A result, or the error that ``get`` raises."""

    def __init__(self, value=None, error=None):
        self.value, self.error = value, error


def put(value):
    return Ref(value)


def get(refs):
    if isinstance(refs, (list, tuple)):
        return [get(one) for one in refs]
    if refs.error is not None:
        raise refs.error
    return refs.value


order = random.Random(0)
"""Draws the order in which results are ready."""

together = 1
"""Results that are ready at once."""


_last = []


def wait(refs, num_returns=1, timeout=None):
    """One result, in a drawn order; that and ``together`` - 1 others to a call that doesn't wait (``timeout`` 0)."""
    global _last
    refs = list(refs)
    if timeout == 0:
        others = [one for one in refs if one not in _last]
        ready = _last + order.sample(others, min(len(others), together - 1))
    else:
        ready = _last = order.sample(refs, min(len(refs), num_returns))
    return ready, [one for one in refs if one not in ready]


class Handle:
    """An object whose methods are called with ``.remote``."""

    def __init__(self, target, calls=None):
        self._target, self._calls = target, calls

    def __getattr__(self, name):
        method = getattr(self._target, name)

        def remote(*arguments, **named):
            arguments = [one.value if isinstance(one, Ref) else one for one in arguments]
            if self._calls is not None:
                self._calls.append(name)
            try:
                return Ref(method(*arguments, **named))
            except Exception as error:
                return Ref(error=error)

        return SimpleNamespace(remote=remote)


def install(patch, *modules):
    """Puts this in Ray's place in ``modules``; ``patch`` is pytest's monkeypatch, or sets attributes like it."""
    for module in modules:
        patch(module, "ray", sys.modules[__name__])
