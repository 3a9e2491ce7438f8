"""Addresses of databases. Whatever is shown, logged or kept of one has no password in it."""

from __future__ import annotations

import re
import shlex
from urllib.parse import unquote

from sqlalchemy.engine import URL, make_url

from tuner.errors import UsageError
from tuner.secrets import is_secret

HIDDEN = "***"
VARIABLE = "TUNER_STORAGE"
"""The environment variable that stands for `--storage`, so that no password needs to be on a command line."""

_USER_PART = re.compile(r"(?<=://).*@", re.DOTALL)
_BEFORE_HOST = re.compile(r"^([\w+]*:?/*).*@", re.DOTALL)
_SCHEME = rf"\1{HIDDEN}@"
_QUERY = re.compile(r"[?&]([^=&]*)=([^&]*)")


def parsed(url: str) -> URL:
    """The parts of an address.

    Raises:
        UsageError: it is no address of a database.
    """
    try:
        return make_url(url)
    except Exception:  # noqa: BLE001 - SQLAlchemy's own, a port that is no number, …: their texts hold the address
        raise UsageError(
            f"'{_BEFORE_HOST.sub(_SCHEME, shown(url))}' is not a database URL; for instance "
            "sqlite:///studies/NAME/study.db or postgresql+psycopg://USER@HOST/DATABASE. "
            "Signs of a password that a URL gives a meaning (@ : / ? # %) are written as %40 and the like"
        ) from None


def shown(url: str) -> str:
    """The address as it may be shown, also of one that cannot be understood."""
    address = _USER_PART.sub(_hidden_user, url)
    return _QUERY.sub(
        lambda part: part[0].replace(part[2], HIDDEN) if is_secret(part[1]) and part[2] else part[0], address
    )


def _hidden_user(part: re.Match[str]) -> str:
    user, colon, _ = part[0].removesuffix("@").partition(":")
    return f"{user}:{HIDDEN}@" if colon else part[0]


def option(url: str | None) -> str:
    """What a command that is shown for copying needs to find the same database; begins with a space."""
    if not url:
        return ""
    address = shown(url)
    return f" --storage {shlex.quote(address) if address != url else address}"


def without_secrets(text: str, url: str | URL) -> str:
    """The text, in which any secret of the address is hidden."""
    whole = url.render_as_string(hide_password=False) if isinstance(url, URL) else url
    secrets = [found[2] for found in _QUERY.finditer(whole) if is_secret(found[1])]
    user = _USER_PART.search(whole)
    secrets += [user[0].removesuffix("@").partition(":")[2]] if user else []
    for secret in sorted({*secrets, *map(unquote, secrets)} - {""}, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return text
