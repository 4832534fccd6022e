"""Our flags on OpenRLHF's command line: taken out before its parser, which refuses what it doesn't know, sees them.

``--metronome.loss a3po``, ``--metronome.a3po.cap=5`` and ``--metronome.sagc.sizes [4,8,16]`` are the keys of the
``metronome:`` block; values are YAML.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

from metronome.errors import ConfigurationError
from metronome.plugins import offered_names, offers, plugin_manager
from metronome.recipes import parse_yaml
from metronome.settings import SELECTORS, parse_settings

PREFIX = "--metronome."
_FLAG = re.compile(r"--|-[A-Za-z]")  # a number may begin with a minus

HELP = """metronome's flags (the rest goes to openrlhf.cli.train_ppo_ray, whose help follows):

  --metronome.rollout_source NAME      synchronous | periodic | bounded
  --metronome.loss NAME                ppo | a3po; left out, OpenRLHF's own loss stays
  --metronome.attention NAME           host | shared_prompt
  --metronome.group_controller NAME    fixed | sagc; left out, G is --rollout.n_samples_per_prompt
  --metronome.in_flight NAME           bounded: finish | abort | resume, what a publication does to running requests
  --metronome.PLUGIN.OPTION VALUE      an option of a selected plug-in, as --metronome.sagc.sizes [4,8,16]
  --metronome.cpu                      the CPU room: no accelerator, for debugging on a laptop

metronome plugins lists every name and option.
"""


def take(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The ``metronome:`` block, nested, and the arguments that are OpenRLHF's.

    A flag's value is the next argument, or stands behind ``=``; one without a value is True.

    Raises ConfigurationError for a flag given twice, or a key that is a value and a mapping at once.
    """
    block: dict[str, Any] = {}
    rest: list[str] = []
    left = list(arguments)
    while left:
        flag = left.pop(0)
        if not flag.startswith(PREFIX):
            _check_prefix(flag)
            rest.append(flag)
            continue
        key, equals, text = flag[len(PREFIX) :].partition("=")
        if not equals and left and not _FLAG.match(left[0]):
            text, equals = left.pop(0), "="
        _put(block, key, parse_yaml(text, flag) if equals else True)
    return block, rest


def check(block: dict[str, Any], cpu: Any) -> None:
    """Raises ConfigurationError for an unknown key, name or option in ``block``, or a value of ``--metronome.cpu``.

    It costs no import of OpenRLHF; ``config.arrange`` looks at what the values mean together.
    """
    if not isinstance(cpu, bool):
        raise ConfigurationError(
            "this flag takes no value", found=cpu, where=f"{PREFIX}cpu", remedy=f"{PREFIX}cpu alone"
        )
    ours = {key: value for key, value in block.items() if key != "in_flight"}
    manager = plugin_manager()
    for key, hook in SELECTORS.items():
        if key in ours and not isinstance(ours[key], str):
            choices = " | ".join(one.offer.name for one in offers(manager) if one.offer.hook == hook)
            raise ConfigurationError(
                f"{key} must be a plug-in's name",
                found=ours[key],
                where=f"{PREFIX}{key}",
                remedy=f"{PREFIX}{key} {choices}",
            )
    parse_settings(ours, offered_names(manager), where=PREFIX[:-1])


def _check_prefix(flag: str) -> None:
    """OpenRLHF's parser refuses a flag that it doesn't know without saying whose it might be."""
    first, _, key = flag.partition("=")[0].partition(".")
    if first.startswith("--") and difflib.SequenceMatcher(None, first, PREFIX[:-1]).ratio() > 0.8:
        raise ConfigurationError(
            "this is neither a flag of metronome nor of OpenRLHF",
            found=flag,
            where="the command line",
            remedy=f"{PREFIX}{key or 'KEY'} VALUE",
        )


def _put(block: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    place = block
    for depth, part in enumerate(path, start=1):
        inner = place.setdefault(part, {})
        if not isinstance(inner, dict):
            raise _both(".".join(path[:depth]), inner)
        place = inner
    if isinstance(place.get(last), dict):
        raise _both(key, value)
    if last in place:
        raise ConfigurationError(
            "this flag is given twice", found=place[last], where=f"{PREFIX}{key}", remedy="give it once"
        )
    place[last] = value


def _both(key: str, value: Any) -> ConfigurationError:
    return ConfigurationError(
        "this key has a value and options below it",
        found=value,
        where=f"{PREFIX}{key}",
        remedy=f"leave {PREFIX}{key} out, or {PREFIX}{key}.OPTION",
    )
