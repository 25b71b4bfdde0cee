"""Turn a provider's error into one line: provider, model, problem and how to fix it."""

from __future__ import annotations

from .._core.validation import sentence
from ..errors import AuthenticationFailed, ContextOverflow, ModelNotFound, ProviderError, RateLimited

_LONGEST = 400
_KEYS = {
    "openai": "api_key=, configure(openai_api_key=...) or OPENAI_API_KEY",
    "anthropic": "api_key=, configure(anthropic_api_key=...) or ANTHROPIC_API_KEY",
}
_FIXES: dict[type[ProviderError], str] = {
    ModelNotFound: "Check model=, the client's default_model= and configure(default_model=...)",
    ContextOverflow: "Send fewer or shorter messages, or trim them in the loop's trim hook",
    RateLimited: "Send fewer requests, or raise the limit at the provider",
}


def explained(error: ProviderError, provider: str, model: str) -> ProviderError:
    """Return the same error with provider, model and a message that says how to fix it."""
    error.provider = error.provider or provider
    error.model = error.model or model
    text = _problem(error)
    source = f"{error.provider}, model {error.model!r}" if error.model else error.provider
    fix = _fix(error)
    error.args = (f"{source}: {sentence(text)} {fix}" if fix else f"{source}: {text}",)
    return error


def _problem(error: ProviderError) -> str:
    # Some servers repeat a rejected key in their answer.
    if isinstance(error, AuthenticationFailed) and error.status == 401:
        text = "the API key was rejected with status 401"
    else:
        text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _fix(error: ProviderError) -> str:
    if isinstance(error, AuthenticationFailed):
        where = _KEYS.get(
            error.provider, "the key of this model's provider, as api_key= or in its environment variable"
        )
        return f"Check {where}"
    return next((fix for kind, fix in _FIXES.items() if isinstance(error, kind)), "")
