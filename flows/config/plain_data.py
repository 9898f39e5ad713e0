"""Plain data of configs, overrides and price tables: YAML readers, and a check that JSON and databases can store it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from blocks.errors import ConfigError

_TEXT, _INT, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float"))
_MAX_NODES = 100_000
MAX_DEPTH = 100
# Field of a run's config.json with the version of its format.
FORMAT_KEY = "format_version"


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the fields of a YAML file, in UTF-8 or UTF-16, or those that a new run takes from the config.json of a run.

    Raises:
        ConfigError: the file is unreadable, invalid, or contains no mapping.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"The config file {path} could not be read ({error.strerror}): check its path.") from error
    source = f"The config file {path}"
    fields = _parse_json(content, source) if path.suffix == ".json" else parse_yaml(content, source)
    if not isinstance(fields, dict):
        raise ConfigError(
            f"The config file {path} is empty or not a mapping: write it as lines of the form field: value."
        )
    return _without_parent(fields) if fields.pop(FORMAT_KEY, None) else fields


def parse_yaml(content: str | bytes, source: str) -> Any:
    """Parse a YAML document.

    Args:
        source: start of the error message, such as ``The config file sft.yaml``.

    Raises:
        ConfigError: the document is not valid YAML, repeats a key, is nested too deeply, is too large once its aliases
            are expanded, or has an integer of more than 64 bits.

    >>> parse_yaml("[1, {a: b}]", "The list")
    [1, {'a': 'b'}]
    """
    try:
        loader = _Loader(content)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check(node, source, depth=1, num_nodes=0)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except ConfigError:
        raise
    except RecursionError as error:
        raise ConfigError(f"{source} is nested too deeply for YAML: remove brackets.") from error
    except yaml.reader.ReaderError as error:
        raise ConfigError(
            f"{source} is not readable text ({error.reason}): save it as UTF-8, without control characters."
        ) from error
    # The constructors of PyYAML raise errors of any kind for values such as `!!int ""`.
    except (yaml.YAMLError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise ConfigError(f"{source} is not valid YAML ({' '.join(str(error).split())}): fix it.") from error


def check_json_values(value: Any, path: str = "") -> None:
    """Check the numbers and texts of plain data, which JSON readers and databases must be able to store.

    Raises:
        ValueError: a number is not finite or has more than 64 bits, a text is not valid Unicode, or a value is binary.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if isinstance(key, str) and not _is_unicode(key):
                raise ValueError(f"the field {key[:100]!a} is not valid Unicode: remove the lone surrogate")
            check_json_values(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple | set | frozenset):
        for index, item in enumerate(value):
            check_json_values(item, f"{path}.{index}" if path else str(index))
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path!r} is {value}, but input should be a finite number")
    elif isinstance(value, int) and not _fits_64_bits(value):
        raise ValueError(f"{path!r} is an integer of more than 64 bits: use a smaller one")
    elif isinstance(value, str) and not _is_unicode(value):
        raise ValueError(f"{path!r} is {value[:100]!a}, which is not valid Unicode: remove the lone surrogate")
    elif isinstance(value, bytes | bytearray):
        raise ValueError(f"{path!r} is binary: write it as text")


def _parse_json(content: bytes, source: str) -> Any:
    """Parse JSON, whose numbers such as 1e-05 and escaped characters YAML reads differently.

    Raises:
        ConfigError: the content is not valid JSON, or is nested too deeply.
    """
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid JSON ({error}): fix it.") from error


def _without_parent(fields: dict[str, Any]) -> dict[str, Any]:
    """Return recorded fields without the tags and the shared engine of the sweep or `rlhf` that started the run."""
    tags = fields.get("mlflow_tags")
    if not isinstance(tags, dict):
        return fields
    own = {key: tag for key, tag in tags.items() if not key.startswith(("mlflow.parentRunId", "tinker_flows."))}
    has_shared_engine = "tinker_flows.sweep" in tags and str(fields.get("base_url")).startswith("block:sweep-")
    return fields | {"mlflow_tags": own} | ({"base_url": "local"} if has_shared_engine else {})


class _Loader(yaml.SafeLoader):
    """Loader that refuses integers of more than 64 bits, which JSON readers and databases do not store.

    As in YAML 1.2, `010` is ten, and `1:30` is a text. In YAML 1.1, they are eight and ninety.
    """

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        tag: str = super().resolve(kind, value, implicit)
        return _TEXT if tag in (_INT, _FLOAT) and ":" in value else tag

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        digits = node.value.replace("_", "")
        is_decimal = digits.lstrip("+-")[:2] not in ("0x", "0b")
        value = int(digits) if is_decimal else super().construct_yaml_int(node)
        if not _fits_64_bits(value):
            shown = node.value if len(node.value) <= 20 else f"{node.value[:20]}..."
            raise ValueError(f"the integer {shown} needs more than 64 bits")
        return value


_Loader.add_constructor(_INT, _Loader.construct_yaml_int)
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?0[0-9_]+$"), [*"+-0"])


def _check(node: yaml.Node, source: str, depth: int, num_nodes: int) -> int:
    """Check a node and all nodes below it; return `num_nodes` plus their number, with every alias expanded."""
    num_nodes += 1
    if depth > MAX_DEPTH:
        raise ConfigError(f"{source} is nested more than {MAX_DEPTH} levels deep, or an alias contains itself: fix it.")
    if num_nodes > _MAX_NODES:
        raise ConfigError(f"{source} has more than {_MAX_NODES:,} values after its aliases are expanded: shorten it.")
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            num_nodes = _check(item, source, depth + 1, num_nodes)
    elif isinstance(node, yaml.MappingNode):
        keys: dict[str, yaml.ScalarNode] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and keys.setdefault(key.value, key) is not key:
                lines = " and ".join(str(entry.start_mark.line + 1) for entry in (keys[key.value], key))
                raise ConfigError(f"{source} has the key {key.value!r} twice, on lines {lines}: remove one.")
            num_nodes = _check(value, source, depth + 1, num_nodes)
    return num_nodes


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _fits_64_bits(value: int) -> bool:
    return -(2**63) <= value < 2**64
