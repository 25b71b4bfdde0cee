"""Load the agents of a worker from `module:attr`."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any, Final

from .._core.lazy_import import load
from .._core.validation import did_you_mean
from ..errors import AgentRuntimeError, InvalidArgument, MissingDependency, brief
from ..interfaces import AgentRuntime
from ..registry import Registry, key_of
from ..runner.runner import AgentRunner

_NAMED: Final = 5  # names in a message, at most
_MOVE: Final = 'Move that line under `if __name__ == "__main__":`'


def attribute_of(target: str, directory: str, wanted: Callable[[object], bool] = inspect.isclass) -> Any:
    """Return what `module:attr` names; modules are also searched in the directory `directory`.

    Args:
        target: The module and the name.
        directory: The directory.
        wanted: Whether a message about an unknown name may name this value of the module.

    Raises:
        InvalidArgument: The target cannot be loaded.
    """
    module, _, name = target.partition(":")
    if not module or not name.isidentifier():
        raise InvalidArgument(f"target must be module:attr, got {brief(target, 500)}. Example: my_agents:Greeter")
    if module.endswith(".py") and os.path.isfile(os.path.join(directory, module)):
        meant = f"{module.removesuffix('.py').replace('/', '.')}:{name}"
        raise InvalidArgument(f"target must be module:attr, got {brief(target, 500)}. Use {brief(meant, 500)}")
    if not os.path.isdir(directory):
        raise InvalidArgument(f"directory {brief(directory, 500)} not found. --agent-path must have {brief(module)}")
    sys.path.insert(0, os.path.abspath(directory))
    there = _load_module(module, directory)
    try:
        return getattr(there, name)
    except AttributeError:
        names = [each for each, value in vars(there).items() if not each.startswith("_") and wanted(value)]
        raise InvalidArgument(f"module {module!r} has no {brief(name)}. {did_you_mean(name, names)}") from None


def agents_of(target: str, directory: str) -> Registry | AgentRunner:
    """Return the registry or runner that `module:attr` names; modules are also searched in the directory `directory`.

    Raises:
        InvalidArgument: The target cannot be loaded, or contains no agents.
    """
    return agents_in(loaded(target, directory), target)


def loaded(target: str, directory: str) -> Any:
    """Return what `module:attr` names, or what it returns if it is a function."""
    found = attribute_of(target, directory, _is_loadable)
    return _call(found, target) if inspect.isroutine(found) else found


def runner_of(found: Any) -> AgentRunner | None:
    """Return the runner of an Orchestrator or a TurnManager, whose runs this process executes; None of another value.

    Both contain a `runner`. Importing their classes would take 0.3 s.
    """
    runner = None if isinstance(found, (type, AgentRunner, AgentRuntime)) else getattr(found, "runner", None)
    if not isinstance(runner, AgentRunner):
        return None
    if isinstance(agent := getattr(found, "agent", None), AgentRuntime):  # of an Orchestrator
        found.work = False  # the worker of this process does
        if runner.registry.get(agent.key) is None:
            runner.registry.register(agent)
    return runner


def agents_in(found: Any, target: str) -> Registry | AgentRunner:
    """Return the registry or runner for what `target` names."""
    found = runner_of(found) or found
    made = found if isinstance(found, AgentRunner) else _registry(found, target, target.partition(":")[0])
    if not (made.registry if isinstance(made, AgentRunner) else made).keys():
        raise InvalidArgument(f"{target} must have at least one agent, got none. Call register(…) in it")
    return made


def _load_module(module: str, directory: str) -> object:
    try:
        return load(module)
    except MissingDependency as error:
        top = module.partition(".")[0]
        if error.name != top:
            raise
        names = sorted(each.name for each in pkgutil.iter_modules([directory]))
        near = difflib.get_close_matches(top, names, n=1)
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names[:_NAMED]) or 'none'}{more}"
        raise InvalidArgument(f"no module {brief(top)} in {os.path.abspath(directory)}: {hint}") from error
    except AgentRuntimeError:
        raise
    except (Exception, SystemExit) as error:
        # A module that starts an event loop fails, because the loop of the command is running.
        if isinstance(error, SystemExit) or {"loop", "running"} <= set(str(error).split()):
            call = "sys.exit" if isinstance(error, SystemExit) else "asyncio.run"
            raise InvalidArgument(
                f"module {brief(module)} runs a program when it is imported ({call}). {_MOVE}"
            ) from error
        raise InvalidArgument(f"module {brief(module)} cannot be imported: {type(error).__name__}: {error}") from error


def _call(fn: Callable[[], Any], target: str) -> Any:
    if inspect.iscoroutinefunction(fn):
        raise InvalidArgument(f"{target} must be a sync function, got a coroutine function")
    try:
        return fn()
    except (Exception, SystemExit) as error:
        raise InvalidArgument(f"{target}() failed: {type(error).__name__}: {error}") from error


def _registry(found: object, target: str, module: str) -> Registry:
    if isinstance(found, Registry):
        return found
    registry = Registry()
    for each in found if isinstance(found, (list, tuple)) else [found]:
        agent = _call(each, target) if inspect.isclass(each) and issubclass(each, AgentRuntime) else each
        if not isinstance(agent, AgentRuntime):
            raise InvalidArgument(_type_error(agent, target, module))
        if registry.get(key := key_of(agent)) is not None:
            raise InvalidArgument(f"{target} must name each agent once, got {key!r} twice. Remove one of them")
        registry.register(agent)
    return registry


def _type_error(found: object, target: str, module: str) -> str:
    fitting = [
        name for name, value in vars(sys.modules[module]).items() if not name.startswith("_") and _is_loadable(value)
    ]
    near = difflib.get_close_matches(target.partition(":")[2], fitting, n=_NAMED, cutoff=0.0)
    kind = f"the class {found.__name__}" if isinstance(found, type) else f"an object of type {type(found).__name__}"
    hint = f". Use {', '.join(f'{module}:{name}' for name in near)}" if near else ""
    wanted = "an agent, a list of agents, a Registry, an AgentRunner, an Orchestrator or a TurnManager"
    return f"{target} must be {wanted}, got {kind}{hint}"


def _is_loadable(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(map(_is_agent, value))
    if isinstance(value, (Registry, AgentRunner)) or _is_agent(value):
        return True
    with contextlib.suppress(Exception):  # a lazy object of another library may raise any error
        return not isinstance(value, type) and isinstance(getattr(value, "runner", None), AgentRunner)
    return False


def _is_agent(value: object) -> bool:
    if isinstance(value, type):
        return issubclass(value, AgentRuntime) and not inspect.isabstract(value)
    return isinstance(value, AgentRuntime)
