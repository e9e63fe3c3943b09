"""The options that each kind of kernels has, and which of them go together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

__all__ = ["CLASSES", "DIRECTIONS", "KERNELS", "Options", "ordered", "unfit"]

# By name; flags are bool. What is left out is the kernels' own choice.
Options = Mapping[str, int]

DIRECTIONS: Final = ("forward", "backward")
# Length classes by kernels. ``template`` is torch's flex attention, whose classes are its specialisations;
# ``dflash`` is ours, where one program serves all lengths. CPU kernels have no options: they are measured to
# try the measuring.
CLASSES: Final[Mapping[str, Sequence[str]]] = {
    "template": ("div128", "int32", "general"),
    "dflash": ("any",),
    "cpu": ("any",),
}
KERNELS: Final = tuple(CLASSES)

_FLAG: Final = (False, True)
_TILE: Final = (16, 32, 64, 128)
_WARPS: Final = (1, 2, 4, 8)
_STAGES: Final = (1, 2, 3, 4, 5)
_HEADS: Final = range(1, 1025)
_LAUNCH: Final[Mapping[str, Sequence[int]]] = {"num_warps": _WARPS, "num_stages": _STAGES}
_SWITCHES: Final[Mapping[str, Sequence[int]]] = {"PRESCALE_QK": _FLAG, "USE_TMA": _FLAG}
_OURS: Final[Mapping[str, Sequence[int]]] = {
    "rows": _TILE,
    "keys": _TILE,
    "warps": _WARPS,
    "stages": _STAGES,
}
# A template's are its ``kernel_options`` without the prefixes fwd_ and bwd_. Of ours, ``abreast`` is how many
# heads run at once, ``warp_specialised`` means that some warps load while others multiply, and backward's
# begin with the name of the kernel: that of queries, or that of keys.
_KNOWN: Final[Mapping[tuple[str, str], Mapping[str, Sequence[int]]]] = {
    ("template", "forward"): {"BLOCK_M": _TILE, "BLOCK_N": _TILE, **_LAUNCH, **_SWITCHES},
    ("template", "backward"): {
        **dict.fromkeys(("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2"), _TILE),
        **_LAUNCH,
        **_SWITCHES,
    },
    ("dflash", "forward"): {**_OURS, "abreast": _HEADS, "tma": _FLAG, "warp_specialised": _FLAG},
    ("dflash", "backward"): {
        **{f"queries_{name}": values for name, values in _OURS.items()},
        "queries_abreast": _HEADS,
        "queries_warp_specialised": _FLAG,
        **{f"keys_{name}": values for name, values in _OURS.items()},
        "tma": _FLAG,
    },
    ("cpu", "forward"): {},
    ("cpu", "backward"): {},
}
_OWN_ROWS: Final = 64  # of our kernels, where no option says otherwise


def ordered(kernels: str, direction: str, options: Options) -> dict[str, int]:
    """The options in one order, whatever order they came in: it shows in the names of a library's sources."""
    return {name: options[name] for name in _KNOWN[kernels, direction] if name in options}


def unfit(kernels: str, direction: str, options: Mapping[str, object]) -> str | None:
    """What is wrong with options, in words; None where nothing is."""
    known = _KNOWN[kernels, direction]
    for name, value in options.items():
        if name not in known:
            return f"{name!r} is no option of {kernels} {direction}; {', '.join(known) or 'none'} are"
        flag = known[name] is _FLAG
        if isinstance(value, bool) is not flag or not isinstance(value, int) or value not in known[name]:
            return f"{name} is {value!r}, which is none of {_words(known[name])}"
    sizes = {name: value for name, value in options.items() if isinstance(value, int)}
    return _contradiction(sizes)


def _contradiction(options: Options) -> str | None:
    # Asserted by the template's backward.
    for outer, inner in (("BLOCK_N1", "BLOCK_M1"), ("BLOCK_M2", "BLOCK_N2")):
        if outer in options and inner in options and options[outer] % options[inner]:
            return f"{outer} is {options[outer]}, no multiple of {inner}, {options[inner]}"
    for prefix in ("", "queries_"):
        if options.get(f"{prefix}warp_specialised"):
            # Two groups of four warps, each with the 64 rows that it multiplies at once.
            if options.get(f"{prefix}rows") != 128 or options.get(f"{prefix}warps", 4) != 4:
                return f"{prefix}warp_specialised takes {prefix}rows of 128 and {prefix}warps of 4"
            if not options.get("tma", True):
                return f"{prefix}warp_specialised takes tma"
    # Our kernel of keys reads what that of queries wrote, for whole tiles of rows.
    wrote, read = (options.get(f"{kernel}_rows", _OWN_ROWS) for kernel in ("queries", "keys"))
    if read > wrote:
        return f"keys_rows is {read}, more than queries_rows, {wrote}"
    return None


def _words(values: Sequence[int]) -> str:
    if isinstance(values, range):
        return f"{values.start} to {values.stop - 1}"
    return ", ".join(map(str, values)).lower() if values is _FLAG else ", ".join(map(str, values))
