"""The keys of the ``metronome:`` block: four selectors, and options under the selected plug-ins' names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from metronome.errors import ConfigurationError, nearest

SELECTORS = {
    "rollout_source": "rollout_source",
    "loss": "policy_loss",
    "attention": "attention",
    "group_controller": "group_controller",
}
"""Selector key -> hook."""

OptionsT = TypeVar("OptionsT", bound=BaseModel)


_KINDS = {
    "float": "a number",
    "finite": "a finite number",
    "int": "a whole number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list, as [4, 8]",
    "list": "a list, as [4, 8]",
    "dict": "a mapping",
    "mapping": "a mapping",
    "model": "a mapping",
}
"""What pydantic's kinds of complaint ask for, by their first word, in our words."""

_BOUNDS = {
    "greater_than_equal": "{ge:g} or more",
    "greater_than": "above {gt:g}",
    "less_than_equal": "{le:g} or less",
    "less_than": "below {lt:g}",
}


class Options(BaseModel):
    """Base of a plug-in's options: frozen, unknown keys rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    def changed(self) -> set[str]:
        """The options whose value isn't the default; a validator refuses those that would have no effect."""
        return {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}


class Settings(Options):
    """The parsed ``metronome:`` block.

    Attributes:
        rollout_source, loss, attention, group_controller: a plug-in's name each.
        options: plug-in name -> its options, not yet validated (each plug-in validates its own).
    """

    rollout_source: str = "synchronous"
    loss: str = "ppo"
    attention: str = "host"
    group_controller: str = "fixed"
    options: Mapping[str, Mapping[str, Any]] = {}

    def options_of(self, name: str) -> Mapping[str, Any]:
        """The options written under the plug-in's name, empty if there are none."""
        return self.options.get(name, {})


def parse_settings(
    block: Mapping[str, Any] | None,
    offered: Iterable[str],
    *,
    where: str = "metronome",
    allow_unselected: bool = False,
) -> Settings:
    """The settings in ``block``.

    Args:
        block: the mapping under ``metronome:``; None means all defaults.
        offered: every name that a loaded plug-in offers.
        where: the place shown in errors.
        allow_unselected: keep options of plug-ins that aren't selected (``metronome compare``).

    Raises ConfigurationError for a wrong type, an unknown key, or options of a plug-in that isn't selected.
    """
    if block is None:
        block = {}
    if not isinstance(block, Mapping):
        raise ConfigurationError(
            "the metronome block must be a mapping", found=block, where=where, remedy="metronome: {loss: ppo}"
        )
    offered = set(offered)
    chosen: dict[str, str] = {}
    options: dict[str, Mapping[str, Any]] = {}
    for key, value in block.items():
        place = f"{where}.{key}"
        if key in SELECTORS:
            if not isinstance(value, str):
                raise ConfigurationError(
                    f"{key} must be a plug-in's name", found=value, where=place, remedy=f"{key}: NAME"
                )
            chosen[key] = value
        elif key in offered:
            if not isinstance(value, Mapping):
                raise ConfigurationError(
                    "a plug-in's options must be a mapping",
                    found=value,
                    where=place,
                    remedy=f"{key}: {{option: value}}",
                )
            if not all(isinstance(name, str) for name in value):
                raise ConfigurationError(
                    "option names must be strings", found=list(value), where=place, remedy="name: value"
                )
            options[key] = dict(value)
        else:
            raise ConfigurationError(
                "unknown key", found=key, where=where, remedy=nearest(str(key), {*SELECTORS, *offered})
            )
    settings = Settings(**chosen, options=options)
    selected = {getattr(settings, key) for key in SELECTORS}
    for name in options:
        if name not in selected and not allow_unselected:
            raise ConfigurationError(
                "options of a plug-in that isn't selected",
                found=name,
                where=f"{where}.{name}",
                remedy=f"select {name!r} with one of {', '.join(SELECTORS)}, or remove its options",
            )
    return settings


def parse_options(model: type[OptionsT], values: Mapping[str, Any], where: str) -> OptionsT:
    """``values`` as ``model``; raises ConfigurationError that names the first wrong key and what to set.

    True and false are refused where a number is wanted: that is what a flag without its value gives.
    """
    for name, value in values.items():
        field = model.model_fields.get(name)
        if isinstance(value, bool) and field is not None and not _takes_bool(field.annotation):
            raise ConfigurationError(
                "invalid value",
                found=value,
                where=f"{where}.{name}",
                remedy=f"{name}: a value of its own, not {str(value).lower()}",
            )
    try:
        return model(**values)
    except ValidationError as error:
        raise configuration_error(error, model, where) from None
    except TypeError:
        raise ConfigurationError(
            "option names must be strings", found=list(values), where=where, remedy="name: value"
        ) from None


def configuration_error(error: ValidationError, model: type[BaseModel], where: str) -> ConfigurationError:
    """The first of pydantic's complaints as one line; a key that is missing may be an unknown one misspelt."""
    complaints = error.errors()
    first = complaints[0]
    if first["type"] == "missing":
        beside = (
            one for one in complaints if one["type"] == "extra_forbidden" and one["loc"][:-1] == first["loc"][:-1]
        )
        first = next(beside, first)
    path = [str(part) for part in first["loc"]]
    place = ".".join([where, *path])
    if first["type"] == "extra_forbidden":
        return ConfigurationError(
            "unknown key",
            found=path[-1],
            where=".".join([where, *path[:-1]]),
            remedy=nearest(path[-1], _fields_at(model, path[:-1])),
        )
    if first["type"] == "missing":
        return ConfigurationError("a required key is missing", where=place, remedy=f"set {path[-1]}")
    wanted = _wanted(first["type"], first.get("ctx") or {})
    message = first["msg"].removeprefix("Value error, ")
    if wanted is not None:
        name = next((part for part in reversed(path) if not part.isdigit()), "")
        message = f"{name}: {wanted}" if name else wanted
    found = first["input"]
    if isinstance(found, Mapping) and not path:  # a validator over the whole block
        found = None
    return ConfigurationError("invalid value", found=found, where=place, remedy=message)


def _wanted(kind: str, context: Mapping[str, Any]) -> str | None:
    """What a value must be, for pydantic's ``kind`` of complaint; None where its own sentence is ours."""
    if kind == "literal_error":
        return f"one of {context['expected']}"
    if kind in _BOUNDS:
        return _BOUNDS[kind].format(**context)
    return _KINDS.get(kind.partition("_")[0])


def _takes_bool(annotation: Any) -> bool:
    return annotation in (bool, Any) or any(_takes_bool(inner) for inner in get_args(annotation))


def _fields_at(model: type[BaseModel], path: list[str]) -> set[str]:
    """The fields of the model at ``path``, through optional blocks and tagged unions."""
    models = [model]
    for part in path:
        fields = [one.model_fields[part] for one in models if part in one.model_fields]
        if fields:
            models = [inner for field in fields for inner in _models_in(field.annotation)]
        else:
            models = [one for one in models if part in _tags(one)]
    return {name for one in models for name in one.model_fields}


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]


def _tags(model: type[BaseModel]) -> set[Any]:
    return {tag for field in model.model_fields.values() for tag in get_args(field.annotation)}
