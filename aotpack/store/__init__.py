"""The node's store: what is kept of packages on this machine, one copy for all processes."""

from aotpack.store.opening import Places, is_offline, keep_front, open_kept, open_package
from aotpack.store.unpacked import Entry, Store, kernel_folder, library_path
from aotpack.store.urls import is_url, shown

__all__ = [
    "Entry",
    "Places",
    "Store",
    "is_offline",
    "is_url",
    "keep_front",
    "kernel_folder",
    "library_path",
    "open_kept",
    "open_package",
    "shown",
]
