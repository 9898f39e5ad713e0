"""Load configs from YAML files, recorded ones of runs and `field=value` overrides, and inspect their fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from blocks.errors import ConfigError
from blocks.urls import hide_credentials
from flows.config.base import CHECKPOINT, Config
from flows.config.methods import CONFIG_PATHS
from flows.config.plain_data import MAX_DEPTH, parse_yaml, read_yaml
from objectives.config.import_path import import_path
from objectives.errors import did_you_mean

C = TypeVar("C", bound=Config)


def load_config(config_type: type[C], path: Path | str | None, overrides: Sequence[str] = ()) -> C:
    """Load a config from a YAML file, or the config.json of a run, and `field=value` overrides.

    Raises:
        ConfigError: The file is unreadable, an override is invalid, or a field is missing, unknown or invalid.
        CredentialsError: A value contains a URL with a user name, a password or a secret.
    """
    fields: dict[str, Any] = read_yaml(Path(path)) if path else {}
    set_overrides(fields, overrides, config_type)
    return validate_fields(config_type, fields)


def set_overrides(fields: dict[str, Any], overrides: Sequence[str], config_type: type[BaseModel]) -> None:
    """Set fields by `field=value` arguments, in place; the values are YAML.

    A text field of the config takes a number, a date or a word such as `yes` as it is written.

    Raises:
        ConfigError: an argument has another form, its value is not YAML, or its path is invalid; see `set_field`.
    """
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(
                f"The argument {hide_credentials(override)!r} must have the form field=value, as in learning_rate=1e-4."
            )
        parsed = parse_yaml(value, f"The argument {hide_credentials(override)[:100]!r}")
        as_written = isinstance(parsed, int | float | date) and _is_text_field(config_type, key.split("."))
        set_field(fields, key, value.strip() if as_written else parsed)


def validate_fields(config_type: type[C], fields: Mapping[str, Any]) -> C:
    """Validate fields into a config.

    Raises:
        ConfigError: A field is missing, unknown or invalid.
        CredentialsError: A value contains a URL with a user name, a password or a secret.
    """
    try:
        return config_type.model_validate(fields)
    except ValidationError as error:
        explanation = _explain(error, fields, config_type)
        end = "" if explanation.endswith("?") else "."
        raise ConfigError(f"The config is invalid: {explanation}{end}") from error


def set_field(fields: dict[str, Any], key: str, value: Any) -> None:
    """Set a field by its dotted path, in place; list entries are addressed by index or by their `name`.

    Raises:
        ConfigError: The path names a missing list entry, goes through a plain value, or has too many levels.

    >>> fields = {"objective": {"regularizers": [{"name": "logic"}]}}
    >>> set_field(fields, "objective.regularizers.logic.weight", 2.0)
    >>> fields
    {'objective': {'regularizers': [{'name': 'logic', 'weight': 2.0}]}}
    """
    path = key.split(".")
    if len(path) > MAX_DEPTH:
        raise ConfigError(
            f"The argument {key[:100]}...=... has a path of {len(path):,} levels, more than {MAX_DEPTH}: name a field."
        )
    _set(fields, path, value, key[:100])


def name_entries(fields: Any, key: str) -> str:
    """Return a dotted path with the entries of lists by their `name` instead of their index, if the name is unique.

    >>> name_entries({"objective": {"regularizers": [{"name": "logic"}]}}, "objective.regularizers.0.weight")
    'objective.regularizers.logic.weight'
    """
    parts = key.split(".")
    for position, part in enumerate(parts):
        if isinstance(fields, list):
            names = [entry.get("name") if isinstance(entry, Mapping) else None for entry in fields]
            index = int(part) if part.isdecimal() else names.index(part) if part in names else len(names)
            fields = fields[index] if index < len(fields) else None
            if index < len(names) and (name := names[index]) and names.count(name) == 1:
                parts[position] = str(name)
        else:
            fields = fields.get(part) if isinstance(fields, Mapping) else None
    return ".".join(parts)


def describe_fields(model: type[BaseModel], prefix: str = "", defaults: BaseModel | None = None) -> Iterator[str]:
    """Yield one help line per field: dotted path, default and description.

    Args:
        defaults: instance of the model whose values are the defaults; None for the model's own defaults.

    >>> from flows.config.base import EngineConfig
    >>> print(next(describe_fields(EngineConfig, "engine.")).split(";")[0])
      engine.dtype=float32  Data type of the base model
    """
    for name, field in model.model_fields.items():
        nested = field.annotation
        if defaults is not None:
            default = getattr(defaults, name)
        else:
            default = "" if field.is_required() else field.get_default(call_default_factory=True)
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            yield from describe_fields(nested, f"{prefix}{name}.", default if isinstance(default, BaseModel) else None)
        else:
            yield f"  {prefix}{name}={default}  {field.description}"


def renderer_names(config: BaseModel) -> list[str]:
    """Return the distinct renderer names in a config.

    >>> from flows.config.base import BuilderConfig
    >>> renderer_names(BuilderConfig(builder="a:B", params={"common_config": {"renderer_name": "llama3"}}))
    ['llama3']
    """
    return list(dict.fromkeys(name for name in field_values(config.model_dump(), "renderer_name") if name))


def field_values(fields: Any, name: str) -> Iterator[Any]:
    """Yield the values of every field with this name, in nested dicts and lists and under dotted keys (`a.b.name`)."""
    if isinstance(fields, Mapping):
        for key, value in fields.items():
            if str(key).rpartition(".")[2] == name:
                yield value
            else:
                yield from field_values(value, name)
    elif isinstance(fields, Sequence) and not isinstance(fields, str):
        for item in fields:
            yield from field_values(item, name)


def _explain(error: ValidationError, fields: Any, config_type: type[Config]) -> str:
    """Describe the first validation error, naming list entries by their `name`; unknown fields come first."""
    errors = error.errors(include_url=False)
    first = next((entry for entry in errors if entry["type"] == "extra_forbidden"), errors[0])
    parts: list[str] = []
    value = fields
    for part in first["loc"]:
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            value = value[part]
            parts.append(str(value.get("name", part)) if isinstance(value, dict) else str(part))
        else:
            is_tag = part == "number" and not (isinstance(value, dict) and part in value)  # of the union of weights
            value = value.get(part) if isinstance(value, dict) else None
            parts += [] if is_tag else [str(part)]
    path = ".".join(parts)
    if first["type"] == "missing":
        missing = [
            ".".join([*parts[:-1], str(entry["loc"][-1])])
            for entry in errors
            if entry["type"] == "missing" and entry["loc"][:-1] == first["loc"][:-1]
        ]
        *others, last = map(repr, missing)
        names = f"{', '.join(others)} and {last} are" if others else f"{last} is"
        return f"{names} missing: set {'them' if others else 'it'} in the config file or as field=value"
    if first["type"] == "extra_forbidden":
        model = _model_of(config_type, first["loc"])
        known = model.model_fields if model else ()
        if methods := _methods_with_fields(config_type, fields):
            start = " or ".join(f"tinker-flows run {method}" for method in methods)
            return (
                f"the field {path!r} is unknown, but this looks like a config of {' or '.join(methods)}: use {start}, "
                f"or --method {methods[0]} with `tinker-flows estimate`"
            )
        others = f"; the fields are {', '.join(known)}" if known else ""
        return f"the field {path!r} is unknown{did_you_mean(parts[-1], known) or others}"
    if first["type"] == "string_pattern_mismatch" and parts[-1:] == ["run_name"]:
        rule = "a run name starts with a letter or digit and has letters, digits and . _ - only"
        return f"{path!r} is {first['input']!r}, but {rule}"
    if first.get("ctx", {}).get("pattern") == CHECKPOINT:
        rule = "use the name of a run, RUN@STEP, RUN@best, RUN@final, a tinker:// path or base"
        return f"{path!r} is {hide_credentials(repr(first['input']))}, but {rule}"
    # A validator that loads another config, as rlhf does for each stage, raises a message with this prefix.
    raised = first["msg"].removeprefix("Value error, ").removeprefix("The config is invalid: ").removesuffix(".")
    message = hide_credentials(raised)
    if first["type"] == "value_error" and isinstance(first["input"], Mapping):  # a rule about several fields
        return f"{path}: {message}" if path else message
    if first["type"] == "string_type" and isinstance(first["input"], int | float | date):
        message += f": quote it, in a command as {path}=\"'...'\""
    return f"{path!r} is {hide_credentials(repr(first['input']))}, but {message[:1].lower()}{message[1:]}"


def _methods_with_fields(config_type: type[BaseModel], fields: Any) -> list[str]:
    """Return the other methods that have all fields of a config; empty if its top-level fields are all known here."""
    if not isinstance(fields, Mapping) or fields.keys() <= config_type.model_fields.keys():
        return []
    types = {method: import_path(path) for method, path in CONFIG_PATHS.items()}
    return [
        method
        for method, other in types.items()
        if isinstance(other, type) and issubclass(other, BaseModel) and fields.keys() <= other.model_fields.keys()
    ]


def _is_text_field(config_type: type[BaseModel], path: Sequence[str]) -> bool:
    model = _model_of(config_type, path)
    field = model.model_fields.get(path[-1]) if model else None
    return field is not None and field.annotation in (str, str | None)


def _model_of(config_type: type[BaseModel], location: Sequence[str | int]) -> type[BaseModel] | None:
    """Return the model that has the field at a location; None if the location does not determine it."""
    model = config_type
    for part in location[:-1]:
        if isinstance(part, str):
            field = model.model_fields.get(part)
            models = list(_models_in(field.annotation)) if field else []
            if len(models) != 1:
                return None
            model = models[0]
    return model


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in an annotation such as ``list[Model] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)


def _set(fields: Any, path: Sequence[str], value: Any, key: str) -> None:
    """Set the field at a path below `fields`, in place; `key` is the whole path for error messages."""
    head, *rest = path
    if isinstance(fields, list):
        names = [str(item.get("name")) if isinstance(item, Mapping) else "" for item in fields]
        # A name that several entries share means the first of them. A number is an index before it is a name.
        entries = {name: index for index, name in reversed([*enumerate(names)])}
        entries |= {str(index): index for index in range(len(fields))}
        if head not in entries:
            raise ConfigError(
                f"The argument {key}=... refers to {head[:100]!r}, which is not in the list; the entries are "
                f"{', '.join(names) or 'none'}."
            )
        if rest:
            _set(fields[entries[head]], rest, value, key)
        else:
            fields[entries[head]] = value
    elif isinstance(fields, dict):
        if rest:
            _set(fields.setdefault(head, {}), rest, value, key)
        else:
            fields[head] = value
    else:
        raise ConfigError(
            f"The argument {key}=... sets {head!r} below {hide_credentials(repr(fields))}, which is a plain value: "
            "name a field of a mapping or an entry of a list."
        )
