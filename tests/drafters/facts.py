"""What twenty published drafters are: facts of their authors, apart from the configs that are read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from aotpack.spec import AttentionSpec, MaskSpec

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """One drafter; ``masks`` has one name for each layer."""

    name: str
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    masks: tuple[str, ...]
    value_dim: int = 0
    block_size: int | None = None
    num_anchors: int | None = None
    window: int | None = None
    dtype: str = "bfloat16"
    scale: float | None = None

    @property
    def source(self) -> Path:
        """What is given to the builder: the config's folder, or the spec file that completes it."""
        places = [EXAMPLES / "drafters" / self.name, EXAMPLES / self.name]
        folder = next(place for place in places if place.exists())
        spec = folder / "spec.toml"
        return spec if spec.exists() else folder

    @property
    def config(self) -> Path:
        """The config as its authors publish it."""
        return (self.source if self.source.is_dir() else self.source.parent) / "config.json"

    @property
    def specs(self) -> dict[str, AttentionSpec]:
        """What the facts say, by the name of the layer mask."""
        return {
            name.removeprefix("speculators-"): AttentionSpec(
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                value_dim=self.value_dim or self.head_dim,
                dtype=self.dtype,
                scale=self.scale or self.head_dim**-0.5,
                mask=self._mask(name),
            )
            for name in dict.fromkeys(self.masks)
        }

    def _mask(self, name: str) -> MaskSpec:
        match name:
            case "full":
                return MaskSpec(family="dflash", block_size=self.block_size)
            case "sliding":
                return MaskSpec(family="dflash", block_size=self.block_size, window=self.window)
            case "speculators-sliding":
                return MaskSpec(
                    family="dflash-speculators", block_size=self.block_size, window=self.window, causal=True
                )
        return MaskSpec(family=name)


def _dflash(
    name: str, hidden: int, heads: tuple[int, int, int], vocab: int, *, layers: int = 5, block: int = 16,
    anchors: int | None = None, masks: tuple[str, ...] = (), window: int | None = None,
) -> Drafter:  # fmt: skip
    return Drafter(
        name=name, hidden_size=hidden, heads=heads[0], kv_heads=heads[1], head_dim=heads[2], vocab_size=vocab,
        masks=masks or ("full",) * layers, block_size=block, num_anchors=anchors, window=window,
    )  # fmt: skip


def _eagle(
    name: str, hidden: int, heads: tuple[int, int, int], vocab: int, dtype: str = "bfloat16"
) -> Drafter:
    return Drafter(
        name=name, hidden_size=hidden, heads=heads[0], kv_heads=heads[1], head_dim=heads[2], vocab_size=vocab,
        masks=("eagle3",), dtype=dtype,
    )  # fmt: skip


DRAFTERS = (
    _dflash("qwen3-8b-dflash", 4096, (32, 8, 128), 151936, anchors=512),
    _dflash("qwen3-4b-dflash", 2560, (32, 8, 128), 151936, anchors=512),
    _dflash("qwen2.5-0.5b-dflash", 896, (14, 2, 64), 151936, anchors=512),
    _dflash(
        "qwen3.6-27b-dflash", 5120, (32, 8, 128), 248320, anchors=512,
        masks=("sliding",) * 4 + ("full",), window=2048,
    ),
    _dflash("qwen3.5-35b-a3b-dflash", 2048, (32, 4, 128), 248320, layers=8),
    _dflash("lfm2.5-1.2b-instruct-dflash", 2048, (32, 8, 64), 65536, layers=8),
    _dflash("longcat-flash-dflash", 6144, (32, 8, 128), 131072),
    _dflash("qwen3-8b-domino", 4096, (32, 8, 128), 151936, anchors=256),
    _dflash("qwen3-8b-dspark", 4096, (32, 8, 128), 151936, block=7),
    _dflash("kimi-k3-dspark", 7168, (64, 16, 64), 163840, block=7),
    _dflash("glm-5.2-dspark", 6144, (64, 16, 64), 154880, block=7),
    _eagle("qwen3-8b-eagle3", 4096, (32, 8, 128), 151936),
    _eagle("gpt-oss-120b-eagle3", 2880, (64, 8, 64), 201088),
    _eagle("deepseek-v3-671b-eagle3", 7168, (56, 8, 128), 129280, "float16"),
    _eagle("qwen3.5-35b-a3b-eagle3", 2048, (16, 2, 256), 248320),
    Drafter(
        name="qwen3-8b-peagle", hidden_size=4096, heads=32, kv_heads=8, head_dim=128, vocab_size=151936,
        masks=("peagle",) * 4,
    ),
    _dflash("torchspec-qwen3-8b-dflash", 4096, (32, 8, 128), 151936),
    Drafter(
        name="torchspec-qwen3-8b-eagle3-mla", hidden_size=4096, heads=32, kv_heads=32, head_dim=192,
        value_dim=128, vocab_size=151936, masks=("eagle3",),
        # yarn by 64 with mscale_all_dim 1, as DeepSeek-V3's attention has it.
        scale=(0.1 * math.log(64) + 1) ** 2 / math.sqrt(192),
    ),
    _eagle("torchspec-minimax-m25-eagle3", 3072, (48, 48, 128), 200064),
    _dflash(
        "speculators-qwen3-8b-dflash", 4096, (32, 8, 128), 151936, anchors=3072,
        masks=("speculators-sliding",) * 5, window=2048,
    ),
)  # fmt: skip
BY_NAME = {drafter.name: drafter for drafter in DRAFTERS}
