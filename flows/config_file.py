"""Configs from YAML files and `field=value` overrides, and what their fields are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from blocks.errors import ConfigError
from flows.config import Config

C = TypeVar("C", bound=Config)


def load_config(config_type: type[C], path: Path | None, overrides: Sequence[str]) -> C:
    """A config from a YAML file and `field=value` overrides.

    Raises:
        ConfigError: the file or a field cannot be read, is unknown or out of its limits.
    """
    fields: dict[str, Any] = read_yaml(path) if path else {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"The argument {override!r} is not of the form field=value, as in learning_rate=1e-4.")
        set_field(fields, key, yaml.safe_load(value))
    return validate_fields(config_type, fields)


def validate_fields(config_type: type[C], fields: Mapping[str, Any]) -> C:
    """A config from its fields.

    Raises:
        ConfigError: a field is missing, unknown or out of its limits.
    """
    try:
        return config_type.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(f"The config is wrong: {_explain(error, fields, config_type)}.") from error


def set_field(fields: dict[str, Any], key: str, value: Any) -> None:
    """Set a field by its dotted path, in place; an entry of a list goes by its number or its `name`.

    Raises:
        ConfigError: a list on the way has no such entry, or a plain value is on the way.

    >>> fields = {"objective": {"regularizers": [{"name": "logic"}]}}
    >>> set_field(fields, "objective.regularizers.logic.weight", 2.0)
    >>> fields
    {'objective': {'regularizers': [{'name': 'logic', 'weight': 2.0}]}}
    """
    _set(fields, key.split("."), value, key)


def describe_fields(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """One line per field, nested ones by their dotted path: its default and what it is.

    >>> from flows.config import EngineConfig
    >>> print(next(describe_fields(EngineConfig, "engine.")).split(".")[1])
    dtype=float32  Of the base model; adapters stay float32
    """
    for name, field in model.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            yield from describe_fields(nested, f"{prefix}{name}.")
        else:
            default = "" if field.is_required() else field.get_default(call_default_factory=True)
            yield f"  {prefix}{name}={default}  {field.description}"


def _explain(error: ValidationError, fields: Any, config_type: type[Config]) -> str:
    """The first thing wrong, with list entries by their names."""
    first = error.errors(include_url=False)[0]
    where: list[str] = []
    for part in first["loc"]:
        if isinstance(fields, list) and isinstance(part, int) and part < len(fields):
            fields = fields[part]
            where.append(str(fields.get("name", part)) if isinstance(fields, dict) else str(part))
        else:
            fields = fields.get(part) if isinstance(fields, dict) else None
            where.append(str(part))
    path = ".".join(where)
    if first["type"] == "missing":
        return f"{path!r} is missing"
    if first["type"] == "extra_forbidden":
        known = f"; the fields are {', '.join(config_type.model_fields)}" if len(where) == 1 else ""
        return f"there is no field {path!r}{known}"
    return f"{path!r} is {first['input']!r}, but {first['msg'][:1].lower()}{first['msg'][1:]}"


def read_yaml(path: Path) -> dict[str, Any]:
    """The fields in a YAML file.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        fields = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"The config file {path} could not be read ({error.strerror}): check --config.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"The config file {path} is not YAML ({' '.join(str(error).split())}): mend it.") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"The config file {path} holds a {type(fields).__name__} where fields are expected.")
    return fields


def _set(fields: Any, path: Sequence[str], value: Any, key: str) -> None:
    head, *rest = path
    if isinstance(fields, list):
        names = [str(item.get("name")) if isinstance(item, Mapping) else "" for item in fields]
        index = int(head) if head.isdigit() else names.index(head) if head in names else -1
        if not 0 <= index < len(fields):
            raise ConfigError(
                f"The argument {key}=... names no entry {head!r}; there are {', '.join(names) or 'none'}."
            )
        if rest:
            _set(fields[index], rest, value, key)
        else:
            fields[index] = value
    elif isinstance(fields, dict):
        if rest:
            _set(fields.setdefault(head, {}), rest, value, key)
        else:
            fields[head] = value
    else:
        raise ConfigError(f"The argument {key}=... goes into {head!r}, whose parent is the plain value {fields!r}.")
