"""Names of hosts in requests."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Final

_HOST: Final = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(:[0-9]{1,5})?")


def host_name(header: str) -> str | None:
    """Return the name or address in a `Host` header in lower case, without its port; None if it is not one."""
    found = _HOST.fullmatch(header)
    return None if found is None else found["name"].strip("[]").lower()


@lru_cache(maxsize=64)
def is_loopback(name: str) -> bool:
    """Whether a host name or address is of this machine only."""
    try:
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
