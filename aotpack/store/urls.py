"""URLs of packages: what may be said of one, and the file system that answers for it."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import SplitResult, urlsplit, urlunsplit

from aotpack.errors import HostError, InputError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["connect", "is_url", "scrubbed", "shown", "sibling"]

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_IN_TEXT: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")
_QUERY: Final = re.compile(r"\?[^\s'\"<>]*=[^\s'\"<>]*")
# In these an @ belongs to the path: hf://owner/name@revision.
_WITHOUT_USER: Final = ("file", "hf", "local", "memory")
_PACKAGES: Final = {
    "http": ("http", "aiohttp"),
    "https": ("http", "aiohttp"),
    "s3": ("s3", "s3fs"),
    "s3a": ("s3", "s3fs"),
    "hf": ("hf", "huggingface_hub"),
}


def is_url(place: str | os.PathLike[str]) -> bool:
    """Whether a place is a URL and not a path."""
    return isinstance(place, str) and _URL.match(place) is not None


def shown(url: str) -> str:
    """A URL as it may be printed and remembered: no user, no password, no query, no fragment.

    Raises:
        InputError: it is not well-formed.
    """
    parts = _parts(url)
    host = parts.netloc if parts.scheme in _WITHOUT_USER else parts.netloc.rpartition("@")[2]
    # Built by hand, since urlunsplit leaves the slashes out where the host is empty.
    return f"{parts.scheme}://{host}{parts.path}"


def scrubbed(text: str) -> str:
    """What a library said, without the secrets of the URLs that it quotes."""
    return _QUERY.sub("", _IN_TEXT.sub(_harmless, text))


def sibling(url: str, suffix: str) -> str:
    """The URL of a file whose name is longer by a suffix."""
    parts = _parts(url)
    if not parts.query and not parts.fragment:
        return url + suffix
    return urlunsplit(parts._replace(path=parts.path + suffix))


def connect(url: str, seconds: float, *, retries: bool = False) -> tuple[AbstractFileSystem, str]:
    """The file system of a URL, and its name for the file.

    Args:
        url: of the file.
        seconds: after which a request is given up.
        retries: let the library of the protocol try again on its own.

    Raises:
        HostError: the package that speaks this protocol is not installed.
        InputError: there is no such protocol.
    """
    import fsspec

    protocol = _parts(url).scheme
    try:
        # A file system of its own: fsspec's shared ones remember listings, and a file may be replaced.
        fs, path = fsspec.url_to_fs(url, skip_instance_cache=True, **_options(protocol, seconds, retries))
    except ImportError:
        raise _not_installed(protocol) from None
    except ValueError as error:
        raise InputError(
            f"{shown(url)} cannot be opened: {scrubbed(str(error))}",
            expected="a path, or a URL such as s3://, https:// or hf://",
            remedy="check the URL",
        ) from None
    if protocol in ("s3", "s3a") and not retries:
        fs.retries = 1
    return fs, path


def _parts(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        # Neither said nor chained: it may hold a secret, in a place that cannot be told.
        problem = f"a {url.partition('://')[0]}:// URL is not well-formed"
    raise InputError(problem, remedy="check it, the brackets of an IPv6 address above all")


def _harmless(match: re.Match[str]) -> str:
    try:
        return shown(match[0])
    except InputError:
        return f"{match[0].partition('://')[0]}://..."


def _options(protocol: str, seconds: float, retries: bool) -> dict[str, Any]:
    from fsspec.config import conf

    given: dict[str, Any] = conf.get(protocol, {})
    if protocol in ("http", "https"):
        import aiohttp

        client = {"timeout": aiohttp.ClientTimeout(total=seconds), "trust_env": True}
        # A server that compresses on its own would answer with other ranges.
        headers = {"Accept-Encoding": "identity", **given.get("headers", {})}
        return {"client_kwargs": {**client, **given.get("client_kwargs", {})}, "headers": headers}
    if protocol in ("s3", "s3a"):
        limits: dict[str, Any] = {"connect_timeout": seconds, "read_timeout": seconds}
        if not retries:
            limits["retries"] = {"total_max_attempts": 1}
        return {"config_kwargs": {**limits, **given.get("config_kwargs", {})}, "use_listings_cache": False}
    return {}


def _not_installed(protocol: str) -> HostError:
    from fsspec.registry import known_implementations

    extra, package = _PACKAGES.get(protocol, ("", ""))
    said = known_implementations.get(protocol, {}).get("err", "")
    remedy = f"pip install 'aotpack[{extra}]', or {package} alone" if extra else said
    return HostError(
        f"the package that reads {protocol}:// URLs is not installed", expected=package or None, remedy=remedy
    )
