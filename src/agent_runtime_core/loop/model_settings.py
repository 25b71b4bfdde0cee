"""The settings of model calls: one table for agents, personalities and single runs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple
from weakref import WeakSet

from .._core.log import log
from .._core.settings import POSITIVE, TEXT, TRUTH, SettingType, check_known, number
from .._core.validation import must
from ..errors import UnknownSetting

#: The key of a run's own settings in its `params`, and the attribute of an agent for further options.
MODEL_SETTINGS: Final = "model_settings"


class ModelSetting(NamedTuple):
    """A setting of model calls.

    `agent` is whether it is an attribute of a ToolCallingAgent, `personality` whether a pack may have it. A run may
    set each of them.
    """

    type: SettingType
    agent: bool = True
    personality: bool = True


def _is_stop(value: Any) -> bool:
    return TEXT_OR_SPACE.fits(value) or (isinstance(value, (list, tuple)) and all(map(TEXT_OR_SPACE.fits, value)))


TEXT_OR_SPACE: Final = SettingType("a text", lambda value: isinstance(value, str) and value != "")
_STOP: Final = SettingType("a text or a list of texts", _is_stop)
_WHOLE: Final = SettingType("a whole number", lambda value: isinstance(value, int) and not isinstance(value, bool))
_CHOICE: Final = SettingType(
    "'auto', 'none', 'required' or a function with its name",
    lambda value: (isinstance(value, str) and value != "") or isinstance(value, Mapping),
)
_TEXTS_BY_NAME: Final = SettingType("a dict", lambda value: isinstance(value, Mapping))

SETTINGS: Final[dict[str, ModelSetting]] = {
    "model": ModelSetting(TEXT),
    "temperature": ModelSetting(number(0, 2)),
    "top_p": ModelSetting(number(0, 1)),
    "max_tokens": ModelSetting(POSITIVE),
    "reasoning_effort": ModelSetting(TEXT),
    "seed": ModelSetting(_WHOLE),
    "stop": ModelSetting(_STOP),
    "presence_penalty": ModelSetting(number(-2, 2)),
    "frequency_penalty": ModelSetting(number(-2, 2)),
    "service_tier": ModelSetting(TEXT),
    "tool_choice": ModelSetting(_CHOICE, personality=False),
    "parallel_tool_calls": ModelSetting(TRUTH, personality=False),
    "user": ModelSetting(TEXT, personality=False),
    # Many agents define an attribute `metadata`, so it is not sent.
    "metadata": ModelSetting(_TEXTS_BY_NAME, agent=False, personality=False),
}
OF_AGENTS: Final = tuple(name for name, each in SETTINGS.items() if each.agent)
#: The sampling options of a personality, by name. Its model is a separate key.
OF_PERSONALITIES: Final = {name: each.type for name, each in SETTINGS.items() if each.personality and name != "model"}

#: Names that other libraries and providers use for a setting of ours.
FOREIGN: Final[dict[str, str]] = {
    name: ours
    for ours, names in {
        "max_tokens": "max_output_tokens max_completion_tokens max_new_tokens max_tokens_to_sample maxTokens "
        "maxOutputTokens maxCompletionTokens num_predict",
        "model": "model_name model_id modelName modelId",
        "stop": "stop_sequences stopSequences",
        "top_p": "topP",
        "reasoning_effort": "reasoningEffort",
        "tool_choice": "toolChoice",
        "parallel_tool_calls": "parallelToolCalls",
        "presence_penalty": "presencePenalty",
        "frequency_penalty": "frequencyPenalty",
        "service_tier": "serviceTier",
        "max_iterations": "maxIterations",
        "system_prompt": "systemPrompt",
        "output_type": "outputType response_format responseFormat",
        "model_settings": "modelSettings",
    }.items()
    for name in names.split()
}
#: Options of model requests that are no setting of ours, and hardly the name of anything else. An agent's attribute of
#: such a name is not sent.
OPTIONS: Final = frozenset({
    "best_of", "context_management", "enable_thinking", "extra_body", "extra_headers", "extra_query",
    "frequency_bias", "guided_json", "guided_regex", "include_reasoning", "logit_bias", "logprobs",
    "max_thinking_tokens", "min_p", "mirostat", "mirostat_tau", "n_probs", "num_ctx", "presence_bias",
    "prompt_cache_key", "prompt_cache_retention", "reasoning_budget", "reasoning_format", "reasoning_max_tokens",
    "repeat_penalty", "repetition_penalty", "safe_prompt", "safety_identifier", "safety_settings", "stream_options",
    "thinking", "thinking_budget", "thinking_config", "tool_config", "top_a", "top_k", "top_logprobs", "typical_p",
    "web_search_options",
})  # fmt: skip
# Shorter names have too many neighbors that mean something else, such as `models` or `limit`.
_LONG: Final = tuple(
    name for name in (*OF_AGENTS, MODEL_SETTINGS, "max_iterations", "output_type", "on_truncated") if len(name) >= 10
)
_NEAR: Final = 0.9  # ratio of difflib: one letter wrong, missing or added
#: Parameters of `run_turn_loop` that are not options of the client.
_OF_THE_LOOP: Final = {
    "ctx", "client", "tools", "limits", "messages", "stream", "output_type", "on_truncated", "cancellation", "hooks",
}  # fmt: skip

_CHECKED: WeakSet[type] = WeakSet()


@cache
def meant_by(name: str) -> str | None:
    """Return the setting that an attribute of this name was meant to be, or None if the name is the user's own."""
    if name in FOREIGN:
        return FOREIGN[name]
    if len(name) > 40 or (name.endswith("s") and name[:-1] in _LONG):  # `output_types` is the user's own
        return None
    near = difflib.get_close_matches(name, _LONG, n=1, cutoff=_NEAR)
    # A word more makes another name: `max_parallel_tool_calls`.
    return near[0] if near and abs(len(near[0]) - len(name)) <= 1 else None


def check_attributes(kind: type, library: type) -> None:
    """Raise UnknownSetting for a class attribute that was meant to be a setting of ours, and would be ignored.

    For an option of model requests that is no setting, log a warning.

    Args:
        kind: The class of an agent. It is checked once.
        library: The class whose attributes are the settings.
    """
    if kind in _CHECKED:
        return
    for each in kind.__mro__:
        if each in library.__mro__:
            continue
        for name, value in vars(each).items():
            if name.startswith("_") or hasattr(library, name) or hasattr(value, "__get__") or isinstance(value, type):
                continue
            if (meant := meant_by(name)) is not None:
                where = f"class {each.__name__} of a {library.__name__}"
                raise UnknownSetting(f"{where}: unknown setting {name!r}. Did you mean {meant!r}?")
            if name in OPTIONS and _leaves_out(kind, name):
                log.warning(
                    "class %s of a %s: the attribute %r is not sent to the model. To send it, write "
                    "model_settings = {%r: ...}",
                    each.__name__, library.__name__, name, name,
                )  # fmt: skip
    _CHECKED.add(kind)


def _leaves_out(kind: type, name: str) -> bool:
    """Return whether the further options of a class do not contain an option, as far as the class shows it."""
    further = getattr(kind, MODEL_SETTINGS, None)
    return further is None or (isinstance(further, Mapping) and name not in further)


def settings_of_agent(agent: Any, called: str) -> dict[str, Any]:
    """Return the settings that the attributes of an agent make; `called` is how messages name the agent.

    Raises:
        InvalidArgument: A value does not fit.
    """
    further = getattr(agent, MODEL_SETTINGS)
    if further is not None and not isinstance(further, Mapping):
        raise must(f"{called}: {MODEL_SETTINGS}", "be a dict or None", further)
    if wrong := sorted(_OF_THE_LOOP & (further or {}).keys()):
        raise UnknownSetting(str(must(f"{called}: {MODEL_SETTINGS}", "have only options of the model", wrong[0])))
    settings = dict(further or {})
    for name in OF_AGENTS:
        value = getattr(agent, name)
        if value is None or callable(value):  # a method of that name is the user's own
            continue
        SETTINGS[name].type.check(f"{called}: {name}", value)
        settings[name] = value
    return settings


def settings_of_run(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the params of a run; None as a value removes the agent's setting.

    Raises:
        InvalidArgument: They are not a dict, or a value does not fit.
        UnknownSetting: A name is not in the table. A run comes from outside, so it cannot set options such as a URL.
    """
    given = params.get(MODEL_SETTINGS)
    if given is None:
        return {}
    called = f"params[{MODEL_SETTINGS!r}]"
    if not isinstance(given, Mapping):
        raise must(called, "be a dict", given)
    for name, value in given.items():
        check_known(name, SETTINGS, called)
        if value is not None:
            SETTINGS[name].type.check(f"{called}: {name}", value)
    return dict(given)
