"""Modules and commands that a config may name: all, or in a deployment's run, own modules and what the operator named.

A worker of Prefect runs a deployment's flow in a process with the variable `PREFECT__FLOW_RUN_ID`. A flow that is
served without a worker sets `TINKER_FLOWS_RESTRICTED_RUN` when its run starts (`flows.runs.rights`). Child processes
inherit the variables. Anyone who can fill in the deployment's form in the Prefect UI can write the config of such a
process. The process therefore imports only `OWN_MODULES`, without `_CODE_LOADERS`, and the modules in the variable
`TINKER_FLOWS_ALLOWED_MODULES`. A run that a terminal has signed keeps the terminal's rights.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection

from objectives.errors import ObjectiveError

ALLOWED_MODULES = "TINKER_FLOWS_ALLOWED_MODULES"
COMMANDS = "TINKER_FLOWS_COMMANDS"
# Modules whose functions are made for the fields that name a function: scorers, graders, extractors, constraints and
# features.
FUNCTION_MODULES = ("examples", "objectives", "tasks.common.graders", "tasks.preference.judges", "tasks.rl.critic")
OWN_MODULES = ("examples", "flows", "objectives", "tasks", "tinker_cookbook", "tinker_flows")
# Modules of tinker-cookbook whose classes import the code that their parameters name.
_CODE_LOADERS = (
    "tinker_cookbook.eval.inspect_evaluators",
    "tinker_cookbook.eval.run_inspect_evals",
    "tinker_cookbook.recipes.verifiers_rl",
)

_FLOW_RUN_OF_WORKER = "PREFECT__FLOW_RUN_ID"
_RESTRICTED_RUN = "TINKER_FLOWS_RESTRICTED_RUN"
_SIGNED_RUN = "TINKER_FLOWS_SIGNED_RUN"


class NotAllowedError(ObjectiveError):
    """Module or command that the config of a deployment may not name; the message is one sentence for the user."""


def is_restricted() -> bool:
    """Return whether configs of this process may name only modules of this project and what the operator has named."""
    run = os.environ.get(_RESTRICTED_RUN) or os.environ.get(_FLOW_RUN_OF_WORKER)
    return bool(run) and os.environ.get(_SIGNED_RUN) != run


def restrict(flow_run_id: str) -> None:
    """Give this process and those that it starts the rights of a deployment's run."""
    os.environ[_RESTRICTED_RUN] = flow_run_id


def accept_signed_run(flow_run_id: str) -> None:
    """Give this process and those that it starts the rights of a terminal, for this flow run.

    The rights are in the environment, because terms also run in other processes.
    """
    os.environ[_SIGNED_RUN] = flow_run_id


def named_modules() -> tuple[str, ...]:
    """Return the modules that the operator named."""
    names = os.environ.get(ALLOWED_MODULES, "").split(",")
    return tuple(name.strip() for name in names if name.strip())


def check_module(module: str, path: str) -> None:
    """Check that a config may import a module.

    Args:
        path: path of an object in the module, for the message.

    Raises:
        NotAllowedError: the process is restricted, and neither the module nor a package above it is allowed.
    """
    is_own = _is_in(module, OWN_MODULES) and not _is_in(module, _CODE_LOADERS)
    if is_restricted() and not is_own and not _is_in(module, named_modules()):
        raise NotAllowedError(
            f"A run of a deployment may not import {path!r}: add the module {module!r} to {ALLOWED_MODULES} of the "
            "worker, or start the run from a terminal."
        )


def check_object(value: object, path: str) -> None:
    """Check the module that defines an object.

    An allowed module may itself have imported the object from a module that is not allowed.

    Raises:
        NotAllowedError: the process is restricted, and the defining module is not allowed (`check_module`).
    """
    check_module(getattr(value, "__module__", None) or type(value).__module__, path)


def check_function(function: object, path: str) -> None:
    """Check a function before it is called with texts of the data or of the model.

    Raises:
        NotAllowedError: a deployment's config names a function that is not made for such a field.
    """
    module = getattr(function, "__module__", None) or type(function).__module__
    if is_restricted() and not _is_in(module, (*FUNCTION_MODULES, *named_modules())):
        raise NotAllowedError(
            f"A run of a deployment may not call {path!r} with texts: name a function of "
            f"{', '.join(FUNCTION_MODULES)}, or add its module to {ALLOWED_MODULES} of the worker."
        )


def check_builder(target: object, path: str, interface: tuple[type, ...]) -> None:
    """Check an object before it is called with the parameters of a config.

    Args:
        interface: base classes of the field's objects and of their builders.

    Raises:
        NotAllowedError: a deployment's config names neither a subclass nor an object of a module that the operator
            named.
    """
    if not is_restricted() or (isinstance(target, type) and issubclass(target, interface)):
        return
    module = getattr(target, "__module__", None) or type(target).__module__
    if not _is_in(module, named_modules()):
        names = " or ".join(kind.__name__ for kind in interface)
        subclass = f"name a subclass of {names}, or " if names else ""
        raise NotAllowedError(
            f"A run of a deployment may not call {path!r} with parameters of its config: {subclass}add its module to "
            f"{ALLOWED_MODULES} of the worker."
        )


def find_command(name: str) -> tuple[str, ...]:
    """Return the words of the command that the operator gave this name in the variable `COMMANDS`.

    Raises:
        ObjectiveError: there is no such command, or the variable is malformed.
    """
    try:
        commands = json.loads(os.environ.get(COMMANDS) or "{}")
        if not all(isinstance(command, list) for command in commands.values()):
            raise TypeError("a command is not a list")
        words = {key: tuple(value) for key, value in commands.items()}
        if not all(isinstance(word, str) for command in words.values() for word in command):
            raise TypeError("a word is not a string")
    except (ValueError, TypeError, AttributeError) as error:
        raise ObjectiveError(
            f'{COMMANDS} is malformed ({error}): set it to a JSON object of lists of words, such as {{"score": '
            '["python", "score.py"]}.'
        ) from error
    if not words.get(name):
        raise ObjectiveError(
            f"There is no command {name!r} in {COMMANDS}, which has {', '.join(sorted(words)) or 'no commands'}: add "
            "it to the variable where the run starts."
        )
    return words[name]


def check_command(command: tuple[str, ...]) -> None:
    """Check that a config may spell out a command.

    Raises:
        NotAllowedError: the config is a deployment's.
    """
    if is_restricted():
        raise NotAllowedError(
            f"The command {' '.join(command)!r} is in the config of a deployment's run: name the command in {COMMANDS} "
            "of the worker and use its name, or start the run from a terminal."
        )


def _is_in(module: str, packages: Collection[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
