"""Tuning records: written and read, refused where they are wrong, and used for their own chip only."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aotpack.build.shipped import shipped, shipped_records
from aotpack.errors import InputError, IntegrityError
from aotpack.spec import AttentionSpec, MaskSpec
from aotpack.targets import Target
from aotpack.tuning import (
    Attention,
    Chip,
    Choice,
    Entry,
    Frozen,
    Measured,
    Record,
    Records,
    Timed,
    to_provenance,
    unfit,
    used_records,
)

SPEC = AttentionSpec(
    heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", mask=MaskSpec(family="dflash", block_size=16)
)
HOPPER = Chip(name="NVIDIA H200", capability=(9, 0), multiprocessors=132)
SM80, SM90 = Target.parse("cuda-sm80"), Target.parse("cuda-sm90")
BACKWARD = ("template", "backward")
FAST = {"rows": 128, "keys": 64, "warps": 8}
TIMED = Timed(lengths=(1, 8208, 12307), median=1e-3, low=9e-4, high=1.1e-3, count=5)


def entry(**changes: Any) -> Entry:
    usual = {
        "attention": Attention.of(SPEC),
        "kernels": "dflash",
        "direction": "forward",
        "length_class": "any",
        "options": FAST,
        "reason": "The best.",
        "candidates": (
            Measured(options={}, error=2e-3, timings=(TIMED,)),
            Measured(options=FAST, error=2e-3, timings=(replace(TIMED, median=9e-4),)),
            Measured(options={"tma": False}, ok=False, why="wrong"),
        ),
    }
    return Entry(**{**usual, **changes})


def record(*entries: Entry, chip: Chip = HOPPER) -> Record:
    return Record(
        chip=chip, tools={"torch": "2.14.1+cu130", "triton": "3.8.0"}, entries=entries or (entry(),)
    )


def written(found: Record, **changes: Any) -> bytes:
    return json.dumps({**json.loads(found.to_bytes()), **changes}).encode()


def test_a_record_survives_its_file_byte_for_byte(tmp_path: Path) -> None:
    backward = entry(direction="backward", options={"keys_warps": 8}, candidates=())
    one, other = record(entry(), backward), record(backward, entry())
    one.write(tmp_path / "record.json")
    found = Record.read(tmp_path / "record.json")
    assert found == one
    assert found.to_bytes() == other.to_bytes() == (tmp_path / "record.json").read_bytes()
    assert found.digest == one.digest
    assert json.loads(one.to_bytes())["schema"] == "aotpack.tuning/1"


def damaged(path: str, value: object) -> bytes:
    data = json.loads(record().to_bytes())
    *places, last = path.split(".")
    table = data
    for place in places:
        table = table[int(place)] if place.isdecimal() else table[place]
    table[last] = value
    return json.dumps(data).encode()


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("schema", "aotpack.tuning/2", "'schema'"),
        ("surprise", 1, "'surprise'"),
        ("chip.capability", "nine", "'chip.capability'"),
        ("chip.multiprocessors", True, "'chip.multiprocessors'"),
        ("chip.name", "NVIDIA\u001b[31m", "'chip.name'"),
        ("entries.0.kernels", "cutlass", r"'entries\[0\].kernels'"),
        ("entries.0.class", "div128", r"'entries\[0\].class'"),
        ("entries.0.direction", "sideways", r"'entries\[0\].direction'"),
        ("entries.0.options", {"rows": 128, "colour": 7}, r"'entries\[0\].options'"),
        ("entries.0.options", {"rows": 100}, r"'entries\[0\].options'"),
        ("entries.0.options", {"rows": True}, r"'entries\[0\].options'"),
        ("entries.0.options", {"tma": 1}, r"'entries\[0\].options'"),
        ("entries.0.options", {"tma": False}, r"'entries\[0\].options'"),  # measured, and wrong
        ("entries.0.options", {"rows": 32}, r"'entries\[0\].options'"),  # never measured
        ("entries.0.attention.dtype", "float8", r"'entries\[0\].attention.dtype'"),
        ("entries.0.attention.colour", 7, r"'entries\[0\].attention.colour'"),
        ("entries.0.candidates.0.ok", "yes", r"'entries\[0\].candidates\[0\].ok'"),
        ("entries.0.candidates.0.timings.0.median", 2, r"timings\[0\].median'"),
        ("entries.0.candidates.0.timings.0.lengths", [1, 2], r"timings\[0\].lengths'"),
        ("entries", {}, "'entries'"),
    ],
)
def test_a_record_that_was_edited_to_nonsense_is_refused_by_its_field(
    path: str, value: object, named: str
) -> None:
    with pytest.raises(IntegrityError, match=f"tuning record x.json field .*{named[1:]}") as caught:
        Record.from_bytes(damaged(path, value), "x.json")
    assert caught.value.remedy == "measure it again with 'aotpack tune'"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_record_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError, match=r"tuning record x\.json"):
        Record.from_bytes(data, "x.json")


def test_two_entries_for_one_attention_are_refused() -> None:
    with pytest.raises(IntegrityError, match="'entries'"):
        Record.from_bytes(record(entry(), entry(reason="Another.")).to_bytes(), "x.json")


def test_a_missing_record_is_an_error_of_the_call(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not there"):
        Record.read(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("kernels", "direction", "options", "problem"),
    [
        (
            "template",
            "backward",
            {"BLOCK_M1": 64, "BLOCK_N1": 32},
            "BLOCK_N1 is 32, no multiple of BLOCK_M1, 64",
        ),
        (
            "template",
            "backward",
            {"BLOCK_M2": 32, "BLOCK_N2": 64},
            "BLOCK_M2 is 32, no multiple of BLOCK_N2, 64",
        ),
        ("dflash", "backward", {"keys_rows": 128}, "keys_rows is 128, more than queries_rows, 64"),
        ("dflash", "backward", {"queries_rows": 32}, "keys_rows is 64, more than queries_rows, 32"),
        (
            "dflash",
            "forward",
            {"warp_specialised": True},
            "warp_specialised takes rows of 128 and warps of 4",
        ),
        (
            "dflash",
            "backward",
            {"queries_warp_specialised": True, "queries_rows": 128, "queries_warps": 8},
            "queries_warp_specialised takes queries_rows of 128 and queries_warps of 4",
        ),
        (
            "dflash",
            "forward",
            {"warp_specialised": True, "rows": 128, "tma": False},
            "warp_specialised takes tma",
        ),
        ("dflash", "forward", {"warp_specialised": False, "rows": 32}, None),
        ("cpu", "forward", {"rows": 64}, "'rows' is no option of cpu forward; none are"),
        ("dflash", "forward", {"tma": 3}, "tma is 3, which is none of false, true"),
        ("dflash", "forward", {"abreast": 0}, "abreast is 0, which is none of 1 to 1024"),
    ],
)
def test_options_that_do_not_go_together(
    kernels: str, direction: str, options: dict[str, int], problem: str | None
) -> None:
    assert unfit(kernels, direction, options) == problem


def test_a_record_is_used_for_its_own_capability_only() -> None:
    records = Records(given={"h200.json": record()})
    found = records.chosen(SM90, SPEC, "dflash")
    assert found == {"any": {"forward": Choice(options=FAST, record=record().digest, chip="NVIDIA H200")}}
    for target in Target.known():
        if target != SM90:
            assert records.chosen(target, SPEC, "dflash") == {}


def test_a_record_of_another_chip_is_refused_by_name() -> None:
    records = Records(given={"h200.json": record()})
    with pytest.raises(InputError) as caught:
        records.check([SM80, Target.parse("cpu-x86_64-v3")], {"full": SPEC})
    assert str(caught.value) == (
        "the tuning record h200.json is of another chip than the build's targets\n"
        "  expected: a record for cuda-sm80, cpu-x86_64-v3\n"
        "  found: NVIDIA H200 (sm90)\n"
        "  what to do: measure that chip with 'aotpack tune', or leave the record out"
    )
    records.check([SM80, SM90], {"full": SPEC})
    # What is shipped was not asked for.
    Records(shipped=[record()]).check([SM80], {"full": SPEC})


def test_a_record_of_other_attentions_is_refused() -> None:
    other = replace(SPEC, heads=16)
    with pytest.raises(InputError, match="has nothing for these specs"):
        Records(given={"h200.json": record()}).check([SM90], {"full": other})


@pytest.mark.parametrize(
    "change",
    [
        {"heads": 16},
        {"kv_heads": 4},
        {"head_dim": 64},
        {"dtype": "float16"},
        {"mask": MaskSpec(family="dflash", block_size=8)},
        {"mask": MaskSpec(family="dflash", block_size=16, window=512)},
    ],
)
def test_an_entry_is_for_its_own_attention(change: dict[str, Any]) -> None:
    usual = {name: getattr(SPEC, name) for name in ("heads", "kv_heads", "head_dim", "dtype", "mask")}
    assert record().entry(SPEC, "dflash", "any", "forward") is not None
    assert record().entry(replace(SPEC, scale=0.5), "dflash", "any", "forward") is not None
    assert record().entry(AttentionSpec(**{**usual, **change}), "dflash", "any", "forward") is None
    assert record().entry(SPEC, "dflash", "any", "backward") is None
    assert record().entry(SPEC, "template", "any", "forward") is None


def test_the_entry_that_says_most_and_the_record_that_was_given_win() -> None:
    broad = entry(attention=Attention(head_dim=128), options={"rows": 32}, candidates=())
    narrow = replace(broad, attention=Attention(head_dim=128, heads=32), options={"rows": 16})
    together, apart = [record(broad, narrow)], [record(broad), record(narrow)]
    for some in (together, apart, apart[::-1]):
        records = Records(shipped=some)
        assert records.chosen(SM90, SPEC, "dflash")["any"]["forward"].options == {"rows": 16}
        given = replace(records, given={"mine.json": record(broad)})
        assert given.chosen(SM90, SPEC, "dflash")["any"]["forward"].options == {"rows": 32}


def test_what_a_build_chose_is_chosen_again_from_its_manifest() -> None:
    sliding = replace(SPEC, mask=MaskSpec(family="causal"))
    chosen = {
        (str(SM90), SPEC.digest): Records(given={"x": record()}).chosen(SM90, SPEC, "dflash"),
        (str(SM90), sliding.digest): shipped().chosen(SM90, sliding, "template"),
        (str(SM80), SPEC.digest): shipped().chosen(SM80, SPEC, "template"),
    }
    plain = json.loads(json.dumps(to_provenance(chosen), sort_keys=True))
    kernels = {(str(SM90), SPEC.digest): "dflash", (str(SM90), sliding.digest): "template"}
    frozen = Frozen.from_provenance(plain, kernels)
    assert frozen.chosen(SM90, SPEC, "dflash") == chosen[str(SM90), SPEC.digest]
    assert frozen.chosen(SM90, sliding, "template") == chosen[str(SM90), sliding.digest]
    # The order of options shows in a library's bytes.
    for length_class, directions in chosen[str(SM90), sliding.digest].items():
        for direction, choice in directions.items():
            again = frozen.chosen(SM90, sliding, "template")[length_class][direction]
            assert list(again.options) == list(choice.options)
    assert frozen.chosen(SM80, SPEC, "template") == {}
    used = {each.digest: each.programs for each in used_records(plain)}
    assert used[record().digest] == ("cuda-sm90 forward any",)
    assert len(used) == 2


def test_a_manifest_whose_tuning_is_nonsense_is_refused() -> None:
    chosen = {(str(SM90), SPEC.digest): Records(given={"x": record()}).chosen(SM90, SPEC, "dflash")}
    plain = to_provenance(chosen)
    with pytest.raises(IntegrityError, match="manifest's tuning field"):
        Frozen.from_provenance({**plain, "records": {}}, {(str(SM90), SPEC.digest): "dflash"})
    with pytest.raises(IntegrityError, match="manifest's tuning field"):
        Frozen.from_provenance(plain, {(str(SM90), SPEC.digest): "template"})
    with pytest.raises(IntegrityError, match="manifest's tuning field"):
        Frozen.from_provenance(plain, {})
    with pytest.raises(IntegrityError, match="manifest's tuning field"):
        used_records({"records": {}, "options": 7})


def test_what_is_shipped_is_of_one_chip_a_capability_and_says_where_it_came_from() -> None:
    found, folder = shipped_records(), Path(__file__).parents[2] / "aotpack" / "build" / "tuning"
    chips = {each.chip for each in found}
    assert "NVIDIA H200" in {chip.name for chip in chips}
    assert len({chip.capability for chip in chips}) == len(chips)
    # As they are written, so that their digests are those of the files.
    assert [each.to_bytes() for each in found] == [path.read_bytes() for path in sorted(folder.glob("*"))]
    for each in found:
        assert all(e.candidates or "by hand" in e.reason for e in each.entries)


def test_kernels_of_our_own_have_on_hopper_what_was_measured_there() -> None:
    measured = shipped().chosen(SM90, SPEC, "dflash")["any"]
    sizes = {"rows": 128, "warps": 4, "warp_specialised": True}
    forward = {**sizes, "keys": 128, "stages": 2}
    assert measured["forward"].options == forward
    backward = {f"queries_{name}": value for name, value in {**sizes, "keys": 64, "stages": 3}.items()}
    assert measured["backward"].options == backward
    # Other heads and other dtypes of that size have the same, from the record for all of them.
    for other in (replace(SPEC, heads=8, kv_heads=4), replace(SPEC, dtype="float16")):
        alike = shipped().chosen(SM90, other, "dflash")["any"]
        assert alike["forward"].record != measured["forward"].record
        assert forward.items() <= alike["forward"].options.items()
        assert backward.items() <= alike["backward"].options.items()
    smaller = shipped().chosen(SM90, replace(SPEC, head_dim=64, value_dim=64), "dflash")["any"]
    assert list(smaller) == ["forward"]
    assert forward.items() <= smaller["forward"].options.items()


def test_heads_of_128_have_on_hopper_what_was_measured_there() -> None:
    causal = replace(SPEC, mask=MaskSpec(family="causal"))

    def backward(m1: int) -> dict[str, int]:
        sizes = {"BLOCK_M1": m1, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 64}
        return {**sizes, "num_warps": 4, "num_stages": 2}

    forward = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
    found = shipped().chosen(SM90, causal, "template")
    assert {n: {d: dict(c.options) for d, c in each.items()} for n, each in found.items()} == {
        "div128": {"backward": backward(64)},
        "int32": {"forward": forward, "backward": backward(32)},
        "general": {"forward": forward, "backward": backward(32)},
    }
    assert shipped().chosen(SM90, replace(causal, dtype="float32", matmul_precision=None), "template") == {}
    assert shipped().chosen(SM80, causal, "template") == {}
