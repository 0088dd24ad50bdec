"""Masks passwords, tokens and keys in flag values and messages before they are written."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

HIDDEN = "***"
NAME = (
    r"[\w.-]*(?:key|token|secret|passwd|password|pwd|auth|authorization|signature|sig|sas|"
    r"credentials?|code)"
)
PARAMETER = re.compile(rf"(?<=[?&;#])({NAME}=)[^&;#\s,'\"]+", re.IGNORECASE)
# User names are masked even without a password, because they may be tokens.
USER = re.compile(r"(?<=://)[^/?#\s]*@")
KINDS = r"(?:access|api|auth|bearer|hf|hub|id|private|refresh|secret|session)[_-]?(?:key|token)"
# Names of secret JSON entries, stricter than NAME because names such as `eos_token` are not secret.
ENTRY = re.compile(
    rf"(?:.*[_-])?(?:{KINDS}|secret|passwd|password|authorization|credentials?)|token",
    re.IGNORECASE,
)
MARK = re.compile(rf"://{re.escape(HIDDEN)}@|[?&;#]{NAME}={re.escape(HIDDEN)}", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """Return the text with the user names and secret parameters in its URLs masked.

    Example: `http://me:pw@host/v1?token=t&model=m` becomes `http://***@host/v1?token=***&model=m`.
    """
    return PARAMETER.sub(rf"\g<1>{HIDDEN}", USER.sub(f"{HIDDEN}@", text))


def hide(value: Any) -> Any:
    """Return a flag's value with the secrets in its strings and entries masked."""
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, Any]", value)
        return {name: _hide_entry(name, entry) for name, entry in entries.items()}
    if isinstance(value, list | tuple):
        return [hide(each) for each in cast("Sequence[Any]", value)]
    return value


def is_hidden(value: Any) -> bool:
    """Return whether part of a flag's value was masked when it was written."""
    if isinstance(value, str):
        return MARK.search(value) is not None
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, Any]", value)
        return any(entry == HIDDEN or is_hidden(entry) for entry in entries.values())
    if isinstance(value, list | tuple):
        return any(is_hidden(each) for each in cast("Sequence[Any]", value))
    return False


def _hide_entry(name: str, entry: Any) -> Any:
    if isinstance(entry, str) and ENTRY.fullmatch(name):
        return HIDDEN
    return hide(entry)
