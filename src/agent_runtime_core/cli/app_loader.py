"""Load the agents of a worker from `module:attr`."""

from __future__ import annotations

import difflib
import inspect
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from .._core.lazy_import import load
from ..errors import AgentRuntimeError, InvalidArgument, MissingDependency, brief
from ..interfaces import AgentRuntime
from ..registry import Registry, key_of
from ..runner.runner import AgentRunner


def agents_of(target: str, directory: str) -> Registry | AgentRunner:
    """Return the registry or runner that `module:attr` names; modules are also searched in the directory `directory`.

    Raises:
        InvalidArgument: The target cannot be loaded, or has no agents.
    """
    module, _, name = target.partition(":")
    if not module or not name.isidentifier():
        raise InvalidArgument(f"target must be module:attr, got {brief(target, 500)}. Example: my_agents:Greeter")
    if not os.path.isdir(directory):
        raise InvalidArgument(f"directory {brief(directory, 500)} not found. --agent-path must have {brief(module)}")
    sys.path.insert(0, os.path.abspath(directory))
    found = _load_target(target, module, directory)
    if inspect.isroutine(found):
        found = _call(found, target)
    made = found if isinstance(found, AgentRunner) else _registry(found, target, module)
    if not (made.registry if isinstance(made, AgentRunner) else made).keys():
        raise InvalidArgument(f"{target} must have at least one agent, got none. Call register(…) in it")
    return made


def _load_target(target: str, module: str, directory: str) -> object:
    try:
        return load(target)
    except MissingDependency as error:
        top = module.partition(".")[0]
        if error.name != top:
            raise
        names = sorted(each.name for each in pkgutil.iter_modules([directory]))
        near = difflib.get_close_matches(top, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names) or 'none'}"
        raise InvalidArgument(f"no module {brief(top)} in {os.path.abspath(directory)}: {hint}") from error
    except AgentRuntimeError:
        raise
    except Exception as error:
        raise InvalidArgument(f"{module} cannot be imported: {type(error).__name__}: {error}") from error


def _call(fn: Callable[[], Any], target: str) -> Any:
    if inspect.iscoroutinefunction(fn):
        raise InvalidArgument(f"{target} must be a sync function, got a coroutine function")
    try:
        return fn()
    except Exception as error:
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
    near = difflib.get_close_matches(target.partition(":")[2], fitting, n=len(fitting) or 1, cutoff=0.0)
    kind = f"the class {found.__name__}" if isinstance(found, type) else f"an object of type {type(found).__name__}"
    hint = f". Use {', '.join(f'{module}:{name}' for name in near)}" if near else ""
    return f"{target} must be an agent, a list of agents, a Registry or an AgentRunner, got {kind}{hint}"


def _is_loadable(value: object) -> bool:
    if isinstance(value, type):
        return issubclass(value, AgentRuntime) and not inspect.isabstract(value)
    return isinstance(value, (AgentRuntime, Registry, AgentRunner))
