"""Options of the commands that open a package in any place."""

from __future__ import annotations

from contextlib import AbstractContextManager

import click

from aotpack.package import Package
from aotpack.store import Store, open_package

__all__ = ["offline_option", "opened"]

offline_option = click.option(
    "--offline", is_flag=True, help="Use no network; exit 6 where the cache folder lacks something."
)


def opened(place: str, offline: bool) -> AbstractContextManager[Package]:
    """The package of a file, a folder or a URL; without ``--offline``, AOTPACK_OFFLINE decides."""
    return open_package(place, Store(), offline=offline or None)
