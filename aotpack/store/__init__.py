"""The node's store: what is kept of packages on this machine, one copy for all processes."""

from aotpack.store.opening import Places, is_offline, open_package
from aotpack.store.unpacked import Entry, Store, kernel_folder, library_path
from aotpack.store.urls import is_url

__all__ = [
    "Entry",
    "Places",
    "Store",
    "is_offline",
    "is_url",
    "kernel_folder",
    "library_path",
    "open_package",
]
