"""What a worker is told to work for: `module:attr`, as a registry of agents or a runner that has one."""

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


def agents_of(target: str, where: str) -> Registry | AgentRunner:
    """What `module:attr` names, found from the directory `where`; InvalidArgument with the way out."""
    module, _, name = target.partition(":")
    if not module or not name.isidentifier():
        raise InvalidArgument(f"{brief(target, 500)} names no agents: write module:attr, as in my_agents:Greeter")
    if not os.path.isdir(where):
        raise InvalidArgument(f"there is no directory {brief(where, 500)} to find {brief(module)} in")
    sys.path.insert(0, os.path.abspath(where))
    found = _loaded(target, module, where)
    if inspect.isroutine(found):
        found = _called(found, target)
    made = found if isinstance(found, AgentRunner) else _registry(found, target, module)
    if not (made.registry if isinstance(made, AgentRunner) else made).keys():
        raise InvalidArgument(f"{target} has no agents: register(…) them in it")
    return made


def _loaded(target: str, module: str, where: str) -> object:
    try:
        return load(target)
    except MissingDependency as error:
        top = module.partition(".")[0]
        if error.name != top:
            raise
        there = sorted(each.name for each in pkgutil.iter_modules([where]))
        near = difflib.get_close_matches(top, there, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(there) or 'none'}"
        raise InvalidArgument(f"no module {brief(top)} in {os.path.abspath(where)}: {hint}") from error
    except AgentRuntimeError:
        raise
    except Exception as error:
        raise InvalidArgument(f"{module} cannot be imported: {type(error).__name__}: {error}") from error


def _called(fn: Callable[[], Any], target: str) -> Any:
    if inspect.iscoroutinefunction(fn):
        raise InvalidArgument(f"{target} is a coroutine function: name a plain one that returns agents")
    try:
        return fn()
    except Exception as error:
        raise InvalidArgument(f"{target}() failed: {type(error).__name__}: {error}") from error


def _registry(found: object, target: str, module: str) -> Registry:
    if isinstance(found, Registry):
        return found
    registry = Registry()
    for each in found if isinstance(found, (list, tuple)) else [found]:
        agent = _called(each, target) if inspect.isclass(each) and issubclass(each, AgentRuntime) else each
        if not isinstance(agent, AgentRuntime):
            raise InvalidArgument(_wrong(agent, target, module))
        if registry.get(key := key_of(agent)) is not None:
            raise InvalidArgument(f"{target} must name each agent once, got {key!r} twice. Remove one of them")
        registry.register(agent)
    return registry


def _wrong(found: object, target: str, module: str) -> str:
    fitting = [name for name, value in vars(sys.modules[module]).items() if not name.startswith("_") and _fits(value)]
    near = difflib.get_close_matches(target.partition(":")[2], fitting, n=len(fitting) or 1, cutoff=0.0)
    kind = f"the class {found.__name__}" if isinstance(found, type) else f"of type {type(found).__name__}"
    hint = f"; there is {', '.join(f'{module}:{name}' for name in near)}" if near else ""
    return f"{target} is {kind}, and no agent, list of agents, Registry or AgentRunner{hint}"


def _fits(value: object) -> bool:
    if isinstance(value, type):
        return issubclass(value, AgentRuntime) and not inspect.isabstract(value)
    return isinstance(value, (AgentRuntime, Registry, AgentRunner))
