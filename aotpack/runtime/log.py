"""What aotpack says of itself, under the logger ``aotpack``: nothing, until somebody listens."""

from __future__ import annotations

import logging
import os
import threading
from typing import Final

from aotpack.errors import InputError

__all__ = ["configure", "debugging", "log"]

log: Final = logging.getLogger("aotpack")
log.addHandler(logging.NullHandler())

_VARIABLE: Final = "AOTPACK_LOG"
_LEVELS: Final = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_FORMAT: Final = "%(asctime)s %(name)s %(levelname)s [%(process)d %(threadName)s] %(message)s"

_lock: Final = threading.Lock()
_handler: Final = logging.StreamHandler()
_handler.setFormatter(logging.Formatter(_FORMAT))


def configure() -> None:
    """Does what ``AOTPACK_LOG`` says: messages of that level and above go to stderr.

    Where the root logger has handlers of the user's own, they get them and stderr does not.

    Raises:
        InputError: the variable names no level.
    """
    said = os.environ.get(_VARIABLE, "").strip().lower()
    if not said:
        return
    if said not in _LEVELS:
        raise InputError(
            f"{_VARIABLE} names no level",
            expected=" or ".join(_LEVELS),
            found=repr(said),
            remedy="set it to one of these, or unset it",
        )
    with _lock:
        log.setLevel(_LEVELS[said])
        if not logging.getLogger().handlers and _handler not in log.handlers:
            log.addHandler(_handler)


def debugging() -> bool:
    """Whether somebody wants to know of every call."""
    return log.isEnabledFor(logging.DEBUG)
