import copy
import dataclasses
import json
import re

import pytest

from aotpack.errors import InputError, IntegrityError
from aotpack.fields import Fields, Form
from aotpack.package import Manifest, Package, Program, write_package
from aotpack.package.manifest import canonical_json

DIGEST = "a SHA-256 in 64 lowercase hex digits"
NAME = "a file name of letters, digits and _ . + -"


@pytest.fixture
def table(assets):
    with Package.open(assets / "tiny.aotpack") as package:
        return package.manifest.to_dict()


def at(table, path):
    """The object that holds the last step of a path, and that step."""
    *steps, last = path
    for step in steps:
        table = table[step]
    return table, last


def paths(value, path=()):
    if path:
        yield path
    for step in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from paths(value[step], (*path, step))


def test_to_dict_and_from_dict_are_inverse(table):
    manifest = Manifest.from_dict(table)
    assert manifest.to_dict() == table
    assert Manifest.from_dict(json.loads(canonical_json(table))) == manifest


def test_absent_facts_are_left_out_and_read_as_none(table):
    requires = table["variants"][1]["requires"]
    assert requires == {
        "cuda": {
            "capability": "9.0a",
            "driver": "525",
            "kernels": [{"name": "flex", "shared_memory": 1024, "registers": 64, "spills": 0}],
        },
        "needed": [],
        "torch_symbols": [],
    }
    del requires["cuda"], table["variants"][1]["vectors"]
    variant = Manifest.from_dict(table).variants[1]
    assert (variant.requires.cuda, variant.requires.glibc, variant.vectors) == (None, None, None)


def test_bounds_ptx_and_symbols_are_kept_and_left_out_where_there_are_none(table):
    program, cuda = table["variants"][1]["programs"][0], table["variants"][1]["requires"]["cuda"]
    assert "bounds" not in program
    program["bounds"], cuda["ptx"] = {"divisor": 128, "max_batch": 65535}, "8.8"
    cuda["symbols"] = ["cuLaunchKernel"]
    manifest = Manifest.from_dict(table)
    assert dict(manifest.variants[1].programs[0].bounds) == {"divisor": 128, "max_batch": 65535}
    assert manifest.variants[1].requires.cuda.ptx == "8.8"
    assert manifest.variants[1].requires.cuda.symbols == ("cuLaunchKernel",)
    assert manifest.to_dict() == table


COUNT = "an integer from 1 to 2147483648"
SIZE = "an integer from 0 to 4611686018427387904"
KEY = f"a key that is {NAME}"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("schema", "x/1", "aotpack.package/1"),
        ("format_version", "2.0", "a format version 1.x"),
        ("calling_convention", 0, COUNT),
        ("calling_convention", True, COUNT),
        ("variants", {}, "a list"),
        ("variants[1]", 7, "an object"),
        ("variants[0].spec", "ab", DIGEST),
        ("variants[0].spec", "a" * 64, "the digest of one of the specs"),
        ("variants[1].target", "cpu-x86_64-v3", "one variant for a spec and target"),
        ("variants[0].target", "../x", NAME),
        ("variants[0].tolerance.out", -1, "a finite number that is not negative"),
        ("variants[0].programs[2].name", "up", "block_mask or forward or backward"),
        ("variants[0].programs[0].specialisation", "a/b", NAME),
        ("variants[0].programs[0].inputs[1]", 3, NAME),
        ("variants[0].requires.glibc", "new", "a version such as 2.34"),
        ("variants[0].requires.instruction_set", "x86_64-vX", "an instruction set such as x86_64-v3"),
        ("variants[1].requires.cuda.capability", "90", "a compute capability such as 9.0 or 9.0a"),
        ("variants[1].requires.cuda.kernels[0].shared_memory", "1k", SIZE),
        ("variants[0].requires.colour", 1, "no such field"),
        ("colour", 1, "no such field"),
        ("provenance", [], "an object"),
    ],
)
def test_error_carries_the_path_of_the_field(table, name, value, expected):
    steps = [int(index) if index else key for index, key in re.findall(r"\[(\d)\]|([^.\[\]]+)", name)]
    holder, last = at(table, steps)
    holder[last] = value
    with pytest.raises(IntegrityError) as caught:
        Manifest.from_dict(table)
    assert caught.value.problem == f"package manifest field '{name}' is wrong"
    assert caught.value.diagnostics() == {
        "expected": expected,
        "found": repr(value),
        "what to do": "fetch or build the package again",
    }


@pytest.mark.parametrize(
    ("change", "name", "expected"),
    [
        (lambda t: t["variants"][0].update(vectors="a" * 64), "variants[0].programs",
         "programs whose blobs are all in the index"),
        (lambda t: t["variants"][0]["programs"][2].update(name="forward"),
         "variants[0].programs[2].specialisation", "one program for a name and specialisation"),
        (lambda t: t["variants"][1]["programs"][0]["kernels"].update({"../evil": "a" * 64}),
         "variants[1].programs[0].kernels.../evil", KEY),
        (lambda t: t["variants"][1]["programs"][0]["kernels"].update({".": "a" * 64}),
         "variants[1].programs[0].kernels..", KEY),
        (lambda t: t["variants"][1]["programs"][0].update(bounds={"divisor": 0}),
         "variants[1].programs[0].bounds.divisor", "an integer from 1 to 4611686018427387904"),
        (lambda t: t["specs"].update({"a b": {}}), "specs.a b", KEY),
        (lambda t: t["specs"]["full"].update(digest="b" * 64), "specs.full.digest",
         "the spec's own digest e399a0811e9fd31118d96e9beff50668e4377b3c264e366e5118371765803457"),
        (lambda t: t["specs"]["full"]["spec"].update(heads=0), "specs.full.spec",
         "a spec that this aotpack reads (spec field 'heads' is wrong)"),
        (lambda t: t["specs"]["full"]["spec"].update(scale=10**400), "specs.full.spec",
         "a spec that this aotpack reads (int too large to convert to float)"),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit_each_other_are_refused(table, change, name, expected):
    change(table)
    with pytest.raises(IntegrityError) as caught:
        Manifest.from_dict(table)
    assert caught.value.problem == f"package manifest field '{name}' is wrong"
    assert caught.value.expected == expected


def test_whole_message(table):
    del table["variants"][1]["programs"][0]["library"]
    with pytest.raises(IntegrityError) as caught:
        Manifest.from_dict(table)
    assert str(caught.value) == (
        "package manifest field 'variants[1].programs[0].library' is wrong\n"
        "  expected: a value\n  found: nothing\n"
        "  what to do: fetch or build the package again"
    )


@pytest.mark.parametrize("data", [None, [], "x", 3, {}, {3: 4}, {"format_version": "1.0"}])
def test_what_is_not_a_manifest_is_refused(data):
    with pytest.raises(IntegrityError):
        Manifest.from_dict(data)


@pytest.mark.parametrize(
    "value", [None, True, -1, 10**400, 0.5, 1e308, "", "x", "../x", "\ud800", "\0", [], [[]], {}, {"": None}]
)
def test_any_field_replaced_by_anything_is_read_or_refused_in_our_words(table, value):
    refused = 0
    for path in paths(table):
        changed = copy.deepcopy(table)
        holder, last = at(changed, path)
        holder[last] = value
        try:
            Manifest.from_dict(changed)
        except IntegrityError as error:
            str(error)
            refused += 1
    assert refused > 100


def test_any_field_left_out_is_read_or_refused_in_our_words(table):
    for path in paths(table):
        changed = copy.deepcopy(table)
        holder, last = at(changed, path)
        del holder[last]
        try:
            Manifest.from_dict(changed)
        except IntegrityError as error:
            str(error)


def test_newer_minor_version_that_adds_nothing_warns_as_well(table):
    table["format_version"] = "1.1"
    text = "package format 1.1 is newer than 1.0, which this aotpack reads; ignored: nothing"
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        Manifest.from_dict(table)


def test_newer_minor_version_does_not_excuse_a_wrong_field(table):
    table["format_version"] = "1.1"
    table["variants"][0]["target"] = 3
    with pytest.raises(IntegrityError, match=r"variants\[0\].target"):
        Manifest.from_dict(table)


def test_many_ignored_fields_make_one_short_warning(table):
    table["format_version"] = "1.1"
    table.update({f"f{i}": 0 for i in range(9)})
    with pytest.warns(UserWarning, match="ignored: f0, f1, f2, f3, f4 and 4 more$") as caught:
        Manifest.from_dict(table)
    assert len(caught) == 1


def test_target_of_a_later_release_is_kept(table):
    table["variants"][0]["target"] = "cuda-sm130"
    assert Manifest.from_dict(table).variants[0].target == "cuda-sm130"


def test_wrong_manifest_is_an_error_of_the_caller_who_writes_it(tmp_path, manifest, blobs):
    wrong = dataclasses.replace(manifest, calling_convention=0)
    with pytest.raises(InputError) as caught:
        write_package(tmp_path / "x", wrong, blobs)
    assert str(caught.value) == (
        "package manifest field 'calling_convention' is wrong\n"
        "  expected: an integer from 1 to 2147483648\n  found: 0"
    )


@pytest.mark.parametrize("value", [float("nan"), object(), b"bytes"])
def test_provenance_that_json_cannot_hold_is_an_error_of_the_caller(tmp_path, manifest, blobs, value):
    with pytest.raises(InputError, match="the manifest cannot be written"):
        write_package(tmp_path / "x", dataclasses.replace(manifest, provenance={"torch": value}), blobs)


def test_variant_finds_its_programs_and_blobs(manifest):
    variant = manifest.variants[1]
    assert variant.program("forward") is variant.programs[1]
    assert variant.program("forward", "multiple_of_128") is None
    assert len(variant.blobs) == len(set(variant.blobs)) == 5


def test_kernels_are_kept_in_the_order_of_their_names():
    kernels = (("b", "1" * 64), ("a", "2" * 64))
    program = Program(name="forward", library="0" * 64, kernels=kernels, inputs=(), outputs=())
    assert program.kernels == (("a", "2" * 64), ("b", "1" * 64))


def test_form_fits_the_whole_string_only():
    assert not Form("[a-z]+", "letters").fits("ab\n")
    with pytest.raises(IntegrityError, match="field 'a' is wrong"):
        Fields({"a": "ab\n"}).text("a", Form("[a-z]+", "letters"))
