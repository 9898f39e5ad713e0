"""Names of metrics and tags in MLflow, which accepts letters, digits and `_ - . / :` and spaces."""

from __future__ import annotations

import hashlib
import posixpath
import re

# Namespaces and metrics of every training run. Evaluators may add durations to time/ and losses to loss/.
_OWN = ("cost/", "guard/", "optim/", "progress/", "system/", "term/", "throughput/")
_OWN_NAMES = (
    "loss/base",
    "loss/base_sum",
    "loss/regularizers",
    "loss/total",
    "num_tokens",
    "time/step",
    "train_mean_nll",
)

# A character that MLflow rejects in names, and a hyphen that would read as the start of an escape sequence.
_FORBIDDEN = r"[^/\w.\- :]"
_ESCAPED = re.compile(rf"{_FORBIDDEN}|-(?=x[0-9a-f]*(?:-|{_FORBIDDEN}))")
# The same for names that are no normal path.
_FORBIDDEN_IN_PATH = r"(?:[^\w.\- :]|^\.)"
_ESCAPED_IN_PATH = re.compile(rf"{_FORBIDDEN_IN_PATH}|-(?=x[0-9a-f]*(?:-|{_FORBIDDEN_IN_PATH}))")
_MAX_NAME = 210  # MLflow's limit is 250; the rest is for prefixes such as `baseline/`


def safe_name(name: str) -> str:
    """Return the name under which MLflow stores a metric or tag of any name; distinct names stay distinct.

    A name that MLflow accepts is unchanged. Other characters become `-xHEX-`, with their code point in hexadecimal. In
    a name that is no normal path, such as `/a` or `a//b`, slashes are such characters. A long name is cut, and ends
    with a hash of the whole name.

    >>> safe_name("test/accuracy"), safe_name("pass@1"), safe_name("acc (%)")
    ('test/accuracy', 'pass-x40-1', 'acc -x28--x25--x29-')
    """
    pattern = _ESCAPED if _is_path(name) else _ESCAPED_IN_PATH
    escaped = pattern.sub(lambda match: f"-x{ord(match[0]):x}-", name) or "-x-"
    if len(escaped) <= _MAX_NAME:
        return escaped
    digest = hashlib.sha256(name.encode()).hexdigest()[:32]
    return f"{escaped[: _MAX_NAME - len(digest) - 1]}-{digest}"


def is_own(name: str) -> bool:
    """Return whether a training run itself logs a metric of this name or namespace.

    >>> is_own("optim/lr"), is_own("test/nll")
    (True, False)
    """
    return name.startswith(_OWN) or name in _OWN_NAMES


def logged_name(name: str) -> str:
    """Return the name under which MLflow stores the metric that a user names in a config.

    The user may name a metric as its evaluator does, or as MLflow shows it.

    >>> logged_name("pass@1"), logged_name("pass-x40-1")
    ('pass-x40-1', 'pass-x40-1')
    """
    is_accepted = _is_path(name) and len(name) <= _MAX_NAME and not re.search(_FORBIDDEN, name)
    return name if is_accepted else safe_name(name)


def _is_path(name: str) -> bool:
    """Return whether a name is a normal path, as MLflow requires."""
    return posixpath.normpath(name) == name and name != "." and not name.startswith(("..", "/"))
