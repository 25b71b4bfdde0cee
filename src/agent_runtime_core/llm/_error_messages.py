"""A provider's error in one sentence: who, which model, what, and the way out."""

from __future__ import annotations

from ..errors import AuthenticationFailed, ContextOverflow, ModelNotFound, ProviderError, RateLimited

_LONGEST = 400
_KEYS = {
    "openai": "api_key=, configure(openai_api_key=...) or OPENAI_API_KEY",
    "anthropic": "api_key=, configure(anthropic_api_key=...) or ANTHROPIC_API_KEY",
}
_WAYS_OUT: dict[type[ProviderError], str] = {
    ModelNotFound: "check model=, the client's default_model= and configure(default_model=...)",
    ContextOverflow: "send fewer or shorter messages, or trim them in the loop's trim hook",
    RateLimited: "ask less often, or raise the limit at the provider",
}


def explained(error: ProviderError, provider: str, model: str) -> ProviderError:
    """The same error, with whom it is about and a text that says the way out."""
    error.provider = error.provider or provider
    error.model = error.model or model
    text = _told(error)
    who = f"{error.provider}, model {error.model!r}" if error.model else error.provider
    error.args = ("; ".join(part for part in (f"{who}: {text}", _way_out(error)) if part),)
    return error


def _told(error: ProviderError) -> str:
    # Some servers repeat the key in their answer to a wrong one.
    if isinstance(error, AuthenticationFailed) and error.status == 401:
        text = "the key is not accepted (401)"
    else:
        text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _way_out(error: ProviderError) -> str:
    if isinstance(error, AuthenticationFailed):
        where = _KEYS.get(
            error.provider, "the key of this model's provider, as api_key= or in its environment variable"
        )
        return f"check {where}"
    return next((way for kind, way in _WAYS_OUT.items() if isinstance(error, kind)), "")
