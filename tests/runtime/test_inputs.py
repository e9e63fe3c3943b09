"""Calls that do not fit: each is refused with what was expected, what was found and what to do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import aotpack
from aotpack.errors import InputError, IntegrityError, MismatchError, NoVariantError
from aotpack.package import Package
from aotpack.spec import AttentionSpec, MaskSpec
from tests.cases import Case, make_case
from tests.process import with_target


@pytest.fixture
def attention(dflash_pack: aotpack.Pack) -> aotpack.Attention:
    return dflash_pack.attention("full")


@pytest.fixture
def case(attention: aotpack.Attention) -> Case:
    return make_case(attention.spec, 2, 100, 5)


def _message(error: pytest.ExceptionInfo[BaseException]) -> list[str]:
    return str(error.value).split("\n  ")


def test_wrong_head_count(attention: aotpack.Attention, case: Case) -> None:
    with pytest.raises(InputError) as error:
        attention(case.q[:, :7], case.k, case.v, attention.block_mask(**case.mask))
    assert _message(error) == [
        "q has the wrong shape for this attention",
        "expected: [batch, 14, length, 64]",
        "found: [2, 7, 80, 64]",
        "what to do: reshape it, or load a package built for this model: pack.require(spec) compares",
    ]


def test_wrong_rank(attention: aotpack.Attention, case: Case) -> None:
    with pytest.raises(
        InputError, match=r"v has the wrong shape.*\n.*\[batch, 2, length, 64\]\n.*\[2, 180, 64\]"
    ):
        attention(case.q, case.k, case.v[:, 0], attention.block_mask(**case.mask))


def test_wrong_dtype(attention: aotpack.Attention, case: Case) -> None:
    with pytest.raises(InputError) as error:
        attention(case.q, case.k.float(), case.v, attention.block_mask(**case.mask))
    assert _message(error) == [
        "k has the wrong dtype for this attention",
        "expected: torch.bfloat16",
        "found: torch.float32",
        "what to do: cast it, run under autocast to bfloat16, or build a package of this dtype",
    ]


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_mixed_devices(attention: aotpack.Attention, case: Case, name: str) -> None:
    tensors = {"q": case.q, "k": case.k, "v": case.v}
    tensors[name] = tensors[name].to("meta")
    with pytest.raises(InputError) as error:
        attention(**tensors, mask=attention.block_mask(**case.mask))
    assert _message(error) == [
        f"{name} is on another device than this attention",
        "expected: cpu",
        "found: meta",
        "what to do: move it, or take the attention of a pack loaded with device='meta'",
    ]


def test_shapes_that_were_right_once_are_refused_in_another_dtype_or_place(
    attention: aotpack.Attention, case: Case
) -> None:
    mask = attention.block_mask(**case.mask)
    attention(case.q, case.k, case.v, mask)
    for wrong in (case.v.float(), case.v.to("meta")):
        with pytest.raises(InputError, match=r"v (has the wrong dtype|is on another device)"):
            attention(case.q, case.k, wrong, mask)
    with pytest.raises(InputError, match="q, k and v do not fit each other"):
        attention(case.q, case.k, case.v[:, :, 1:], mask)


def test_batches_that_differ(attention: aotpack.Attention, case: Case) -> None:
    with pytest.raises(InputError, match="q, k and v do not fit each other"):
        attention(case.q[:1], case.k, case.v, attention.block_mask(**case.mask))


def test_mask_made_for_other_lengths(attention: aotpack.Attention, case: Case) -> None:
    other = make_case(attention.spec, 2, 101, 5)
    with pytest.raises(InputError) as error:
        attention(case.q, case.k, case.v, attention.block_mask(**other.mask))
    assert _message(error) == [
        "the mask was made for other lengths",
        "expected: batch 2, query length 80, key length 180",
        "found: batch 2, query length 80, key length 181",
        "what to do: make a new mask whenever the batch, the anchors or the context change",
    ]


def test_mask_of_another_rule(masks_pack: aotpack.Pack) -> None:
    attention, other = masks_pack.attention("full"), masks_pack.attention("sliding")
    case = make_case(attention.spec, 1, 100, 5)
    with pytest.raises(InputError, match="made by another rule"):
        attention(case.q, case.k, case.v, other.block_mask(**case.mask))


@pytest.mark.parametrize("wrong", [None, torch.ones(80, 180, dtype=torch.bool)])
def test_something_else_where_a_mask_is_expected(
    attention: aotpack.Attention, case: Case, wrong: object
) -> None:
    with pytest.raises(InputError, match="the mask is no block mask"):
        attention(case.q, case.k, case.v, wrong)


@pytest.mark.parametrize("wrong", [-1, 100, 10**12])
def test_anchors_out_of_range(attention: aotpack.Attention, case: Case, wrong: int) -> None:
    anchors = case.mask["anchors"].clone()
    anchors[1, 3] = wrong
    keep = torch.ones_like(case.mask["keep"])
    with pytest.raises(InputError) as error:
        attention.block_mask(anchors=anchors, keep=keep, context_len=100)
    assert _message(error) == [
        "anchors are out of range",
        "expected: positions from 0 to 99, the context being 100 tokens long",
        f"found: 1 others, for example {wrong}",
        "what to do: sample anchors inside the context, or clear keep for blocks that are padding",
    ]
    keep[1, 3] = False
    attention.block_mask(anchors=anchors, keep=keep, context_len=100)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"keep": None}, "called with the wrong arguments"),
        ({"document_ids": torch.zeros(100, dtype=torch.int64)}, "called with the wrong arguments"),
        ({"anchors": torch.zeros(2, 5)}, "anchors has the wrong dtype"),
        ({"anchors": torch.zeros(5, dtype=torch.int64)}, "keep does not fit the other inputs"),
        ({"anchors": torch.zeros(1, 2, 5, dtype=torch.int64)}, "anchors has the wrong shape"),
        ({"anchors": torch.zeros(2, 0, dtype=torch.int64)}, "anchors has the wrong shape"),
        ({"keep": torch.ones(2, 6, dtype=torch.bool)}, "keep does not fit the other inputs"),
        ({"keep": torch.ones(2, 5, dtype=torch.bool, device="meta")}, "keep is on another device"),
        ({"context_len": 0}, "context_len is wrong"),
        ({"context_len": 10.5}, "context_len is wrong"),
    ],
)
def test_mask_arguments(
    attention: aotpack.Attention, case: Case, change: dict[str, object], problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        attention.block_mask(**{**case.mask, **change})  # type: ignore[arg-type]


def test_package_for_another_spec_prints_the_differing_fields(
    dflash_pack: aotpack.Pack, dflash_package: Path
) -> None:
    spec = dflash_pack.attention("full").spec
    wanted = dataclasses.replace(spec, heads=16, mask=MaskSpec(family="dflash", block_size=8))
    with pytest.raises(MismatchError) as error:
        dflash_pack.require(wanted)
    assert _message(error)[2:4] == [
        "found: 'full', which differs in",
        "  heads: expected 16, found 14",
    ]
    assert "mask.block_size: expected 8, found 16" in str(error.value)
    with pytest.raises(MismatchError, match="heads: expected 16, found 14"):
        aotpack.load(dflash_package, specs={"full": wanted})
    dflash_pack.require(spec)
    dflash_pack.require({"full": spec})
    aotpack.load(dflash_package, specs=[spec])


def test_an_attention_that_is_not_there(dflash_pack: aotpack.Pack) -> None:
    with pytest.raises(InputError, match="no attention of that name") as error:
        dflash_pack.attention("sliding")
    assert "expected: 'full'" in str(error.value)
    assert dflash_pack.attention() is dflash_pack.attention("full")


def test_devices_that_are_not_there(dflash_package: Path) -> None:
    for device in ("tpu", "mps", "cuda:x"):
        with pytest.raises(InputError, match="device"):
            aotpack.load(dflash_package, device)
    if not torch.cuda.is_available():
        with pytest.raises(aotpack.AotpackError, match="cpu-x86_64-v3: "):
            aotpack.load(dflash_package, "cuda:0")


def test_eager_must_be_asked_for_and_says_so(dflash_package: Path, tmp_path: Path) -> None:
    path = with_target(dflash_package, tmp_path / "arm.aotpack", "cpu-aarch64")
    with pytest.raises(NoVariantError, match="cpu-aarch64"):
        aotpack.load(path)
    with pytest.warns(UserWarning, match="dense eager attention") as warned:
        pack = aotpack.load(path, on_miss="eager")
    assert len(warned) == 1
    attention, compiled = pack.attention("full"), aotpack.load(dflash_package).attention("full")
    case = make_case(attention.spec, 2, 100, 5)
    out, lse = attention(case.q, case.k, case.v, attention.block_mask(**case.mask), return_lse=True)
    right, right_lse = compiled(case.q, case.k, case.v, compiled.block_mask(**case.mask), return_lse=True)
    assert torch.allclose(out, right, atol=0.02)
    assert torch.allclose(lse, right_lse, atol=1e-4)


def test_truncated_and_altered_files(dflash_package: Path, tmp_path: Path) -> None:
    raw = dflash_package.read_bytes()
    path = tmp_path / "bad.aotpack"
    for wrong in (raw[:-1], raw[: len(raw) // 2], raw[:20], b"", raw[:5000] + b"x" + raw[5001:], raw + b"x"):
        path.write_bytes(wrong)
        with pytest.raises(IntegrityError) as error:
            aotpack.load(path)
        assert error.value.exit_code == 4
    with Package.open(dflash_package) as package:
        library = package.manifest.blobs[package.manifest.variants[0].programs[0].library]
        front = package.size - max(blob.offset + blob.size for blob in package.manifest.blobs.values())
    middle = front + library.offset + library.size // 2
    path.write_bytes(raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AOTPACK_CACHE", str(tmp_path / "empty"))
        with pytest.raises(IntegrityError):
            aotpack.load(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        aotpack.load(tmp_path / "none.aotpack")
    with pytest.raises(InputError, match="does not hold exactly one package"):
        aotpack.load(tmp_path)


def test_a_pack_for_float32_only(float32_pack: aotpack.Pack) -> None:
    spec: AttentionSpec = float32_pack.attention("full").spec
    assert spec.dtype == "float32"
    assert float32_pack.target in ("cpu-x86_64-v3", "cpu-aarch64")
