"""Construction of dataset builders by import path, with default parameters from the run."""

from __future__ import annotations

import json
import re
import sys
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import Enum
from types import MappingProxyType
from typing import Any

import chz
from chz.blueprint import Castable, ExtraneousBlueprintArg
from tinker_cookbook.preference.preference_datasets import ComparisonDatasetBuilder
from tinker_cookbook.rl.types import RLDatasetBuilder
from tinker_cookbook.supervised.types import SupervisedDatasetBuilder
from tinker_cookbook.tokenizer_utils import Tokenizer

from blocks.errors import ConfigError, StorageError, TinkerFlowsError
from blocks.files.local import missing_file_error, path_of
from objectives.config.import_path import import_path
from objectives.config.import_policy import NotAllowedError, check_builder, check_function
from tasks.common.internals.chz import guard_imports
from tasks.common.renderers import find_renderer_name
from tasks.common.tokenizers import lock_tokenizers

# Extras of this project by the package that they install.
_EXTRAS = {"textarena": "arena", "reasoning_gym": "gym", "inspect_ai": "inspect"}

# Error of chz; it names the type as `module.Enum | None` or `module:Enum`.
_ENUM_ERROR = re.compile(
    r"argument (?P<value>.+?) provided for param '(?P<name>[^']+)'.*?Could not cast .+? to "
    r"(?P<module>[\w.]+)[.:](?P<kind>\w+)",
    re.DOTALL,
)

_GZIP = b"\x1f\x8b"

_INTERFACES = {
    "comparisons": ComparisonDatasetBuilder,
    "data": SupervisedDatasetBuilder,
    "environment": RLDatasetBuilder,
}

NO_RESOURCES: Mapping[str, Any] = MappingProxyType({})


def build(
    field: str,
    builder: str,
    params: Mapping[str, Any],
    tokenizer: Tokenizer,
    call: Callable[[Any], tuple[Any, Any]],
    resources: Mapping[str, Any] = NO_RESOURCES,
) -> tuple[Any, Any]:
    """Return the training and test datasets of a builder, by its import path.

    `params` may be nested, and a list may contain the parameters of builders. Tokenizer names, renderer names and
    resources that `params` leave out come from the run.

    Args:
        field: config field of the builder, for error messages.
        call: function that returns the datasets of a constructed builder.
        resources: open resources of the run by parameter name, such as `session`, `directory` and `base_model`.

    Raises:
        ConfigError: the builder does not exist, rejects its parameters or cannot read its data.
    """
    lock_tokenizers()
    guard_imports()
    target = import_builder(builder, f"{field}.builder", _INTERFACES[field])
    flat = _flatten(params)
    # tinker-cookbook divides by it only when the data is read.
    size = flat.get("common_config.batch_size")
    if isinstance(size, int) and size < 1:
        raise ConfigError(f"{field}.params.common_config.batch_size is {size}: set it to at least 1.")
    try:
        blueprint = chz.Blueprint(target).apply(_expand_lists(target, flat), layer_name=f"{field}.params")
        return call(_with_defaults(blueprint, default_params(tokenizer, resources)).make())
    except FileNotFoundError as error:
        file = str(error.filename or error)
        name = next((name for name, value in flat.items() if isinstance(value, Castable) and value.value == file), "")
        raise missing_file_error(file, ".".join(filter(None, [field, "params", name]))) from error
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # third-party code: any error concerns its data
        if refusal := _refusal(error):
            raise ConfigError(f"{field}.params: {refusal}") from error
        if wrong := _wrong_enum_value(error):
            raise ConfigError(f"{field}.params.{wrong}.") from error
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError) and (problem := _file_problem(flat, error)):
            raise ConfigError(f"{builder} cannot read the data file {problem}.") from error
        raise ConfigError(
            f"The data source {builder} could not be read ({type(error).__name__}: {one_line(error)}): "
            f"check {field}.params and the file it names."
        ) from error


@contextmanager
def data_errors(what: str) -> Iterator[None]:
    """Report errors inside the block as those of a data source, whose code may be anyone's; the project's own pass.

    Args:
        what: what is read, such as "Batch 3 of the held-out data".

    Raises:
        StorageError: the files or the network fail, which may work later.
        ConfigError: anything else failed.
    """
    try:
        yield
    except TinkerFlowsError:
        raise
    except OSError as error:
        raise StorageError(f"{_unreadable(what, error)}: check the files or the network of its data source.") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{_unreadable(what, error)}: check the parameters and the rows of its data source."
        ) from error


def _unreadable(what: str, error: BaseException) -> str:
    return f"{what} could not be read ({type(error).__name__}: {one_line(error).rstrip('.')})"


def takes(field: str, builder: str, params: Mapping[str, Any], name: str) -> bool:
    """Return whether a builder or one of its nested builders has a parameter called `name`, set by `params` or not.

    False if `params` do not fit the builder.

    Raises:
        ConfigError: the builder does not exist.
    """
    guard_imports()
    target = import_builder(builder, f"{field}.builder", _INTERFACES[field])
    try:
        blueprint = chz.Blueprint(target).apply(_expand_lists(target, _flatten(params)))
    except Exception:  # noqa: BLE001  # `build` reports the error
        return False
    try:
        blueprint.apply({f"...{name}": None}, strict=True)
    except TypeError:  # None is of another type than the parameter
        return True
    except Exception:  # noqa: BLE001  # there is no such parameter, or `build` reports the error
        return False
    return True


def import_object(path: str, field: str) -> Any:
    """Import the object at `package.module:name` or `package.module.name`.

    Args:
        field: config field of the path, for error messages.

    Raises:
        ConfigError: the module or name does not exist, or the config of a deployment may not name it.
    """
    try:
        return import_path(path)
    except NotAllowedError as error:
        raise ConfigError(f"{field}: {error}") from error
    except (ImportError, ValueError) as error:
        if extra := _missing_extra(error):
            raise ConfigError(
                f"{field} is {path!r}, which needs a package that is not installed ({one_line(error)}): install it "
                f"with pip install 'tinker-flows[{extra}]'."
            ) from error
        raise ConfigError(
            f"{field} is {path!r}, which cannot be imported ({error}): give an import path such as package.module:Name."
        ) from error


def import_function(path: str, field: str) -> Any:
    """Import a function that is called with texts from the data or from the model.

    Raises:
        ConfigError: as for `import_object`, or a deployment's config may not name this function (`check_function`).
    """
    function = import_object(path, field)
    try:
        check_function(function, path)
    except NotAllowedError as error:
        raise ConfigError(f"{field}: {error}") from error
    return function


def import_builder(path: str, field: str, interface: type | tuple[type, ...]) -> Any:
    """Import an object that is called with parameters of the config.

    Args:
        interface: base classes of the field's objects or of their builders, which `check_builder` checks.

    Raises:
        ConfigError: as for `import_object`, or a deployment's config may not name this builder (`check_builder`).
    """
    target = import_object(path, field)
    try:
        check_builder(target, path, interface if isinstance(interface, tuple) else (interface,))
    except NotAllowedError as error:
        raise ConfigError(f"{field}: {error}") from error
    return target


def _refusal(error: BaseException | None) -> NotAllowedError | None:
    """Return the first `NotAllowedError` among an error and its causes; None if there is none."""
    while error is not None and not isinstance(error, NotAllowedError):
        error = error.__cause__ or error.__context__
    return error


def _wrong_enum_value(error: BaseException) -> str:
    """Return a clause with the value that an enum of the builder lacks and its values; empty for another error."""
    match = _ENUM_ERROR.search(str(error))
    kind = getattr(sys.modules.get(match["module"]), match["kind"], None) if match else None
    if match is None or not (isinstance(kind, type) and issubclass(kind, Enum)):
        return ""
    return f"{match['name']} is {match['value']}: use one of {', '.join(str(member.value) for member in kind)}"


def _file_problem(flat: Mapping[str, Any], error: json.JSONDecodeError | UnicodeDecodeError) -> str:
    """Return a clause about the file in the parameters that causes an error; empty if none is found."""
    text = error.doc.strip() if isinstance(error, json.JSONDecodeError) else None
    for value in flat.values():
        path = path_of(value.value) if isinstance(value, Castable) else None
        if not path or not path.is_file():
            continue
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if number == 1 and line.startswith(BOM_UTF8):
                    return f"{path}, which starts with a byte order mark: save it as UTF-8 without the mark"
                if number == 1 and line.startswith(_GZIP):
                    return f"{path}, which is compressed: decompress it with gunzip"
                if line.decode(errors="replace").strip() == text:
                    what = "not valid JSON" if text else "empty"
                    return f"{path}, whose line {number} is {what}: fix or remove it"
    return ""


def _missing_extra(error: BaseException | None) -> str:
    """Return the extra of tinker-flows that installs the package whose import failed; empty if there is none."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and (extra := _EXTRAS.get((error.name or "").partition(".")[0])):
            return extra
        error = error.__cause__ or error.__context__
    return ""


def one_line(error: BaseException) -> str:
    """Message of an error on one line, shortened to 300 characters."""
    return " ".join(str(error).split())[:300]


def default_params(tokenizer: Tokenizer, resources: Mapping[str, Any]) -> dict[str, Any]:
    """Return the run's values for parameters of tinker-cookbook's builders; in chz, `...` matches at any depth."""
    name = tokenizer.name_or_path
    renderer = find_renderer_name(name, tokenizer)
    defaults: dict[str, Any] = {"...model_name_for_tokenizer": name, "model_name": name, "policy_model_name": name}
    defaults |= {f"...{parameter}": value for parameter, value in resources.items()}
    return defaults | ({"...renderer_name": renderer, "policy_renderer_name": renderer} if renderer else {})


def _with_defaults(blueprint: chz.Blueprint[Any], defaults: Mapping[str, Any]) -> chz.Blueprint[Any]:
    """Blueprint with the defaults that match its parameters; its own values take precedence."""
    matching: dict[str, Any] = {}
    for name, value in defaults.items():
        # The parameters depend on the nested builders, so each default is tried.
        with suppress(ExtraneousBlueprintArg):
            blueprint.clone().apply({name: value}, strict=True)
            matching[name] = value
    return chz.Blueprint(blueprint.target).apply(matching, layer_name="the model's").apply(blueprint)


def _expand_lists(target: Any, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten the lists that the target does not take as values, such as a list with the parameters of each builder."""
    params = {name: value for name, value in flat.items() if not isinstance(value, list)}
    lists = {name: value for name, value in flat.items() if isinstance(value, list)}
    while lists:
        name, items = lists.popitem()
        if not items or _accepts(target, params | {name: items}):
            params[name] = items
            continue
        if {} in items:
            raise ConfigError(f"An item of the list {name} is empty: name one of its parameters, or remove the item.")
        for key, value in _flatten(dict(enumerate(items)), f"{name}.").items():
            (lists if isinstance(value, list) else params)[key] = value
    return params


def _accepts(target: Any, params: Mapping[str, Any]) -> bool:
    """Return whether the given parameters have the right types; other parameters may be missing."""
    try:
        chz.Blueprint(target).apply(params).get_help()  # chz checks the types before it writes the help
    except TypeError:
        return False
    return True


def _flatten(params: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in params.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = Castable(value) if isinstance(value, str) else value
    return flat
