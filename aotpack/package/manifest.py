"""The manifest of a package: what is in it, for which device types, and what each variant needs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from aotpack.errors import AotpackError
from aotpack.fields import Fields, Form
from aotpack.spec import AttentionSpec
from aotpack.targets import CudaRequirements, Kernel, Requirements

__all__ = [
    "FORMAT_VERSION",
    "MAX_BLOB",
    "PROGRAMS",
    "SCHEMA",
    "Blob",
    "Manifest",
    "Program",
    "Variant",
    "canonical_json",
]

SCHEMA: Final = "aotpack.package/1"
FORMAT_VERSION: Final = (1, 0)
PROGRAMS: Final = ("block_mask", "forward", "backward")
MAX_BLOB: Final = 1 << 28

_DIGEST: Final = Form(r"[0-9a-f]{64}", "a SHA-256 in 64 lowercase hex digits")
_NAME: Final = Form(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}", "a file name of letters, digits and _ . + -")
_VERSION: Final = Form(r"[0-9]{1,9}(\.[0-9]{1,9}){0,3}", "a version such as 2.34")
_FORMAT: Final = Form(rf"{FORMAT_VERSION[0]}\.[0-9]{{1,5}}", f"a format version {FORMAT_VERSION[0]}.x")
_CAPABILITY: Final = Form(r"[0-9]{1,3}\.[0-9][af]?", "a compute capability such as 9.0 or 9.0a")
_ISA: Final = Form(r"[a-z0-9_]{1,40}(-v[0-9]{1,2})?", "an instruction set such as x86_64-v3")
_SYMBOL: Final = Form(r"[!-~]{1,4000}", "a symbol of printable ASCII")
_SIZES: Final = (0, 1 << 62)


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob:
    """Where one blob lies. Its key in the index is the SHA-256 of its raw bytes.

    Attributes:
        offset: of its zstd frame, in bytes from the end of the front.
        size: of its zstd frame, in bytes.
        raw_size: in bytes, decompressed.
        frame_sha256: SHA-256 of the zstd frame.
        dictionary: key of the blob whose raw bytes are the frame's raw-content dictionary.
    """

    offset: int
    size: int
    raw_size: int
    frame_sha256: str
    dictionary: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One compiled program of a variant.

    Attributes:
        name: ``"block_mask"``, ``"forward"`` or ``"backward"``.
        specialisation: the shape class it was compiled for; of those that fit a call, the first is taken.
        bounds: of the shape class: ``max_batch``, ``max_length`` (of the query and of the key axis) and
            ``max_elements`` (of any tensor); ``divisor`` of both lengths; ``batch``, ``query`` and ``key``
            where only one size will do; ``rows``, what the query rows of a call are a multiple of, for
            programs that are called for one chunk of rows after another. What is left out is not bounded; a
            reader takes no program that has a bound it does not know.
        library: blob key of the shared library.
        kernels: file names and blob keys of the cubins that the library loads.
        inputs: names of the input tensors, in order.
        outputs: names of the output tensors, in order.
    """

    name: str
    specialisation: str = "general"
    bounds: Mapping[str, int] = field(default_factory=dict)
    library: str
    kernels: tuple[tuple[str, str], ...] = ()
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "kernels", tuple(sorted(self.kernels)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One spec compiled for one target: programs that were built together.

    Attributes:
        spec: digest of the spec.
        target: name of the target; readers keep a name that they do not know.
        programs: at most one for each name and specialisation.
        requires: what the binaries need of a machine.
        vectors: blob key of the golden vectors (safetensors).
        tolerance: largest error allowed against fp64 math, by output name.
    """

    spec: str
    target: str
    programs: tuple[Program, ...]
    requires: Requirements
    vectors: str | None = None
    tolerance: Mapping[str, float] = field(default_factory=dict)

    @property
    def code(self) -> tuple[str, ...]:
        """Keys of the blobs that are loaded to run it, each once, in the order of first use."""
        keys = [k for p in self.programs for k in (p.library, *(key for _, key in p.kernels))]
        return tuple(dict.fromkeys(keys))

    @property
    def blobs(self) -> tuple[str, ...]:
        """Keys of all blobs of the variant, each once: its code, then its golden vectors."""
        return tuple(dict.fromkeys([*self.code, *([self.vectors] if self.vectors else [])]))

    def program(self, name: str, specialisation: str = "general") -> Program | None:
        """The program of that name and specialisation, if the variant has it."""
        found = (p for p in self.programs if (p.name, p.specialisation) == (name, specialisation))
        return next(found, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything a package says about itself.

    Attributes:
        calling_convention: version of the programs' calling convention; not the file format's version.
        specs: the specs by their names in this package.
        variants: at most one for each spec and target.
        provenance: versions and options of the build, as JSON values; no paths, host names or times.
        blobs: index by key; ``write_package`` fills it.
        format_version: major and minor version of the file format.
    """

    calling_convention: int
    specs: Mapping[str, AttentionSpec]
    variants: tuple[Variant, ...]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    blobs: Mapping[str, Blob] = field(default_factory=dict)
    format_version: tuple[int, int] = FORMAT_VERSION

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the targets that there are variants for, each once, in their order."""
        return tuple(dict.fromkeys(variant.target for variant in self.variants))

    def to_dict(self) -> dict[str, Any]:
        """JSON values; what is None is left out."""
        return {
            "schema": SCHEMA,
            "format_version": ".".join(map(str, self.format_version)),
            "calling_convention": self.calling_convention,
            "specs": {n: {"digest": s.digest, "spec": s.to_dict()} for n, s in self.specs.items()},
            "variants": [_variant_dict(variant) for variant in self.variants],
            "provenance": dict(self.provenance),
            "blobs": {key: _present(blob) for key, blob in self.blobs.items()},
        }

    @classmethod
    def from_dict(cls, data: object) -> Manifest:
        """Inverse of ``to_dict``.

        Fields unknown to this release are an error, or a warning where the manifest's minor version is
        newer than this release's.

        Raises:
            IntegrityError: with the path of the field that is wrong.
        """
        version = Fields(data).text("format_version", _FORMAT)
        newer = int(version.partition(".")[2]) > FORMAT_VERSION[1]
        ignored: list[str] | None = [] if newer else None
        manifest = _manifest(Fields(data, ignored=ignored))
        if newer:
            _warn_newer(version, ignored or [])
        return manifest


def canonical_json(data: object) -> bytes:
    """ASCII JSON with sorted keys and no spaces; ``ValueError`` for what JSON cannot hold."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def _warn_newer(version: str, ignored: list[str]) -> None:
    known = ".".join(map(str, FORMAT_VERSION))
    names = ", ".join(ignored[:5]) + (f" and {len(ignored) - 5} more" if len(ignored) > 5 else "")
    text = f"package format {version} is newer than {known}, which this aotpack reads; ignored: "
    warnings.warn(text + (names or "nothing"), stacklevel=3)


def _present(value: Any) -> dict[str, Any]:
    values = {f.name: getattr(value, f.name) for f in fields(value)}
    return {n: list(v) if isinstance(v, tuple) else v for n, v in values.items() if v is not None}


def _variant_dict(variant: Variant) -> dict[str, Any]:
    requires = _present(variant.requires)
    if (cuda := variant.requires.cuda) is not None:
        requires["cuda"] = {**_present(cuda), "kernels": [_present(kernel) for kernel in cuda.kernels]}
        if not cuda.symbols:
            del requires["cuda"]["symbols"]
    programs = [_program_dict(program) for program in variant.programs]
    tolerance = dict(variant.tolerance)
    return {**_present(variant), "programs": programs, "requires": requires, "tolerance": tolerance}


def _program_dict(program: Program) -> dict[str, Any]:
    data = {**_present(program), "kernels": dict(program.kernels)}
    del data["bounds"]
    return data | ({"bounds": dict(program.bounds)} if program.bounds else {})


def _manifest(table: Fields) -> Manifest:
    table.text("schema", Form(SCHEMA, SCHEMA))
    major, _, minor = table.text("format_version", _FORMAT).partition(".")
    blobs, specs = table.table("blobs"), table.table("specs")
    manifest = Manifest(
        format_version=(int(major), int(minor)),
        calling_convention=table.integer("calling_convention", 1, 1 << 31),
        blobs={key: _blob(blobs.table(key)) for key in blobs.keys(_DIGEST)},
        specs={name: _spec(specs.table(name)) for name in specs.keys(_NAME)},
        variants=tuple(_variant(variant) for variant in table.tables("variants")),
        provenance=table.plain("provenance"),
    )
    _check_variants(table, manifest)
    _check_dictionaries(blobs, manifest)
    table.finish()
    return manifest


def _check_variants(table: Fields, manifest: Manifest) -> None:
    digests = {spec.digest for spec in manifest.specs.values()}
    seen = set[tuple[str, str]]()
    for variant, at in zip(manifest.variants, table.tables("variants"), strict=True):
        if variant.spec not in digests:
            at.wrong("spec", "the digest of one of the specs")
        if not manifest.blobs.keys() >= set(variant.blobs):
            at.wrong("programs", "programs whose blobs are all in the index")
        if (variant.spec, variant.target) in seen:
            at.wrong("target", "one variant for a spec and target")
        seen.add((variant.spec, variant.target))


def _check_dictionaries(blobs: Fields, manifest: Manifest) -> None:
    for key, blob in manifest.blobs.items():
        if blob.dictionary is None:
            continue
        base = manifest.blobs.get(blob.dictionary)
        # One step at most, so that reading a blob never walks a chain or a loop.
        if base is None or base.dictionary is not None:
            blobs.table(key).wrong("dictionary", "the key of a blob that has no dictionary itself")


def _blob(table: Fields) -> Blob:
    blob = Blob(
        offset=table.integer("offset", *_SIZES),
        size=table.integer("size", 1, 2 * MAX_BLOB),
        raw_size=table.integer("raw_size", 0, MAX_BLOB),
        frame_sha256=table.text("frame_sha256", _DIGEST),
        dictionary=table.optional_text("dictionary", _DIGEST),
    )
    table.finish()
    return blob


def _spec(table: Fields) -> AttentionSpec:
    digest = table.text("digest", _DIGEST)
    try:
        spec = AttentionSpec.from_dict(table.plain("spec"))
        matches = spec.digest == digest
    except (AotpackError, ArithmeticError, RecursionError, TypeError, ValueError) as error:
        problem = error.problem if isinstance(error, AotpackError) else str(error)
        table.wrong("spec", f"a spec that this aotpack reads ({problem})")
    if not matches:
        table.wrong("digest", f"the spec's own digest {spec.digest}")
    table.finish()
    return spec


def _variant(table: Fields) -> Variant:
    tolerance = table.table("tolerance")
    programs = table.tables("programs")
    variant = Variant(
        spec=table.text("spec", _DIGEST),
        target=table.text("target", _NAME),
        programs=tuple(_program(program) for program in programs),
        requires=_requirements(table.table("requires")),
        vectors=table.optional_text("vectors", _DIGEST),
        tolerance={name: tolerance.number(name) for name in tolerance.keys(_NAME)},
    )
    seen = set[tuple[str, str]]()
    for program, at in zip(variant.programs, programs, strict=True):
        if (program.name, program.specialisation) in seen:
            at.wrong("specialisation", "one program for a name and specialisation")
        seen.add((program.name, program.specialisation))
    table.finish()
    return variant


def _bounds(table: Fields) -> Mapping[str, int]:
    return {name: table.integer(name, 1, 1 << 62) for name in table.keys(_NAME)}


def _program(table: Fields) -> Program:
    program = Program(
        name=table.text("name", Form("|".join(PROGRAMS), " or ".join(PROGRAMS))),
        specialisation=table.text("specialisation", _NAME),
        bounds=_bounds(table.table("bounds")) if "bounds" in table else {},
        library=table.text("library", _DIGEST),
        kernels=table.pairs("kernels", _NAME, _DIGEST),
        inputs=table.texts("inputs", _NAME),
        outputs=table.texts("outputs", _NAME),
    )
    table.finish()
    return program


def _requirements(table: Fields) -> Requirements:
    requirements = Requirements(
        instruction_set=table.optional_text("instruction_set", _ISA),
        glibc=table.optional_text("glibc", _VERSION),
        libstdcxx=table.optional_text("libstdcxx", _VERSION),
        needed=table.texts("needed", _NAME),
        torch_symbols=table.texts("torch_symbols", _SYMBOL),
        cuda=_cuda(table.table("cuda")) if "cuda" in table else None,
    )
    table.finish()
    return requirements


def _cuda(table: Fields) -> CudaRequirements:
    cuda = CudaRequirements(
        capability=table.text("capability", _CAPABILITY),
        kernels=tuple(_kernel(kernel) for kernel in table.tables("kernels")),
        driver=table.optional_text("driver", _VERSION),
        ptx=table.optional_text("ptx", _VERSION),
        symbols=table.texts("symbols", _SYMBOL) if "symbols" in table else (),
    )
    table.finish()
    return cuda


def _kernel(table: Fields) -> Kernel:
    kernel = Kernel(
        name=table.text("name", _SYMBOL),
        shared_memory=table.integer("shared_memory", *_SIZES),
        registers=table.optional_integer("registers", *_SIZES),
        spills=table.optional_integer("spills", *_SIZES),
    )
    table.finish()
    return kernel
