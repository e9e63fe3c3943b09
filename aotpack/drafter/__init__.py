"""From a drafter to the specs of its attention.

A drafter is a HF ``config.json`` as it is, a folder that holds one, a transformers config object, a live
module, or a TOML spec file that says what a config does not. Nothing is ever fetched.

A spec file either completes a config::

    config = "config.json"          # a file or a folder, relative to this file

    [mask]                          # optional; wins over the config
    family = "dflash"               # any of aotpack.masks, or "my_package.masks:rule"
    block_size = 16                 # of the families that draft
    window = 2048                   # of the sliding layers
    causal = true                   # dflash-speculators with a window only

    [score]                         # optional; how scores are changed before the softmax
    family = "my_package.scores:bias"

    [attention]                     # optional; wins over the config
    dtype = "float32"               # also: heads, kv_heads, head_dim, value_dim, scale

or says everything, one table for each spec::

    [specs.full]
    heads = 32
    kv_heads = 8
    head_dim = 128
    dtype = "bfloat16"

    [specs.full.mask]
    family = "dflash"
    block_size = 16

A mask or score that needs nothing but its name may be given as that: ``mask = "my_package.masks:rule"``.
Rules of your own (``aotpack.own``) are looked for in the spec file's folder, in the current one, and where
Python looks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aotpack.drafter.config import open_config
from aotpack.drafter.live import check_module, module_overrides, unwrapped
from aotpack.drafter.overrides import Overrides
from aotpack.drafter.reading import read_specs
from aotpack.drafter.specfile import read_spec_file
from aotpack.spec import AttentionSpec

__all__ = ["specs_from_config", "specs_from_module"]


def specs_from_config(
    source: str | Path | Mapping[str, Any] | Any,
    *,
    family: str | None = None,
    block_size: int | None = None,
    window: int | None = None,
    causal: bool | None = None,
    dtype: str | None = None,
    scale: float | None = None,
) -> dict[str, AttentionSpec]:
    """The specs of a drafter, by the name of the layer mask: ``full``, ``sliding``, ``eagle3`` or ``peagle``.

    EAGLE-3 drafters get SpecForge's and TorchSpec's rule, or speculators' where the config is of its format.
    Any other family, and a rule of your own, gives one spec with its name; a spec file with ``[specs.NAME]``
    tables gives those names.

    Args:
        source: path of a config.json, of a folder with one, or of a TOML spec file; the content of a
            config.json; or a transformers config object.
        family: mask family; wins over the source, as do all below.
        block_size: query rows that one anchor drafts, in tokens.
        window: window of the sliding layers, in tokens.
        causal: the ``dflash-speculators`` window's variant.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        scale: factor of the scores.

    Raises:
        SpecError: the source is missing, malformed or no drafter; the message names the field.
        UnsupportedError: a drafter of a family, or with a score modification, that aotpack does not know.
    """
    overrides = Overrides.of(
        family=family, block_size=block_size, window=window, causal=causal, dtype=dtype, scale=scale
    )
    if isinstance(source, str | Path) and Path(source).suffix == ".toml":
        return read_spec_file(Path(source), overrides)
    return read_specs(open_config(source), overrides)


def specs_from_module(
    module: Any,
    *,
    family: str | None = None,
    block_size: int | None = None,
    window: int | None = None,
    causal: bool | None = None,
    dtype: str | None = None,
    scale: float | None = None,
) -> dict[str, AttentionSpec]:
    """The specs of a live drafter, checked against its layers, so that builder and trainer cannot drift.

    Args:
        module: a torch module with a transformers ``config`` and a ``block_size``, there or in the config.
        family: as in ``specs_from_config``, and so are the others. Without ``dtype`` the attention
            projections' dtype is taken, whatever the config says; give it where autocast changes it.

    Raises:
        SpecError: the config contradicts the layers' projections, head size, scale or window, or the
            module is no drafter; the message names the field.
        UnsupportedError: as in ``specs_from_config``.
    """
    given = Overrides.of(
        family=family, block_size=block_size, window=window, causal=causal, dtype=dtype, scale=scale
    )
    drafter = unwrapped(module)
    config = open_config(drafter.config, origin=f"config of {type(drafter).__name__}")
    specs = read_specs(config, module_overrides(drafter, config, given))
    check_module(drafter, config, specs)
    return specs
