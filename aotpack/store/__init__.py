"""The node's store: what is kept of packages on this machine, one copy for all processes."""

from aotpack.store.unpacked import Entry, Store, kernel_folder, library_path

__all__ = ["Entry", "Store", "kernel_folder", "library_path"]
