"""``aotpack inspect``: what is in a package. Needs no torch."""

from __future__ import annotations

import json
from typing import Any

import click

from aotpack.cli.console import Console, talking
from aotpack.cli.places import offline_option, opened
from aotpack.cli.text import columns, fields, size
from aotpack.package import Manifest, Package, Variant
from aotpack.tuning import used_records

__all__ = ["inspect"]


@click.command()
@click.argument("file")
@offline_option
@click.option("--sbom", is_flag=True, help="Print a CycloneDX document: components and files.")
@talking
def inspect(console: Console, file: str, offline: bool, sbom: bool) -> None:
    """Print what is in a package: specs, variants, sizes, requirements, provenance.

    FILE may be a URL, of which the index alone is read.
    """
    with opened(file, offline) as package:
        data = {"path": package.name, "bytes": package.size, **describe(package)}
        if sbom:
            console.show("aotpack.sbom/1", document := _sbom(package), json.dumps(document, indent=2))
            return
    console.show("aotpack.inspect/1", data, _text(data))


def describe(package: Package) -> dict[str, Any]:
    """The manifest with sizes, as JSON values."""
    manifest = package.manifest
    written = manifest.to_dict()
    return {
        "digest": package.digest,
        "format_version": written["format_version"],
        "calling_convention": manifest.calling_convention,
        "specs": written["specs"],
        "variants": [
            _variant(manifest, variant, plain)
            for variant, plain in zip(manifest.variants, written["variants"], strict=True)
        ],
        "provenance": written["provenance"],
    }


def _sbom(package: Package) -> dict[str, Any]:
    """The bill of materials that the package records, completed with its files and their SHA-256."""
    recorded = package.manifest.provenance.get("sbom", {})
    files = {
        f"{variant.target}/{variant.spec[:12]}/{program.name}.{program.specialisation}/{name}": key
        for variant in package.manifest.variants
        for program in variant.programs
        for name, key in (("library.so", program.library), *program.kernels)
    }
    components = [
        {"type": "file", "name": name, "hashes": [{"alg": "SHA-256", "content": key}]}
        for name, key in files.items()
    ]
    head = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1}
    return {**head, **recorded, "components": [*recorded.get("components", []), *components]}


def _variant(manifest: Manifest, variant: Variant, plain: dict[str, Any]) -> dict[str, Any]:
    programs = [
        {
            **program,
            "bytes": manifest.blobs[program["library"]].size,
            "raw_bytes": manifest.blobs[program["library"]].raw_size,
        }
        for program in plain["programs"]
    ]
    return {
        "specs": [name for name, spec in manifest.specs.items() if spec.digest == variant.spec],
        "target": variant.target,
        "bytes": sum(manifest.blobs[key].size for key in variant.blobs),
        "raw_bytes": sum(manifest.blobs[key].raw_size for key in variant.blobs),
        "programs": programs,
        "requires": plain["requires"],
        "vectors": variant.vectors,
        "tolerance": plain["tolerance"],
    }


def _text(data: dict[str, Any]) -> str:
    head = [
        ("package", data["path"]),
        ("size", size(data["bytes"])),
        ("digest", data["digest"]),
        ("format", f"{data['format_version']}, calling convention {data['calling_convention']}"),
        *((name, value) for name, value in data["provenance"].items() if isinstance(value, str)),
        *(("tuning", text) for text in _tuning(data["provenance"])),
    ]
    specs = [[name, _spec(entry["spec"]), entry["digest"][:12]] for name, entry in data["specs"].items()]
    return "\n\n".join(
        [
            fields(head),
            columns(specs, ["spec", "what it is", "digest"]),
            *(_variant_text(variant) for variant in data["variants"]),
        ]
    )


def _tuning(provenance: dict[str, Any]) -> list[str]:
    """A line for each tuning record that kernel options came from."""
    options = provenance.get("options")
    if not isinstance(options, dict) or "tuning" not in options:
        return []
    return [
        f"{used.chip}, record {used.digest}: {', '.join(used.programs)}"
        for used in used_records(options["tuning"])
    ]


def _spec(spec: dict[str, Any]) -> str:
    mask = ", ".join(f"{name}={value}" for name, value in spec["mask"].items() if name != "family")
    value = "" if spec["value_dim"] == spec["head_dim"] else f"/{spec['value_dim']}"
    shape = f"{spec['heads']}/{spec['kv_heads']} heads of {spec['head_dim']}{value}"
    return f"{shape}, {spec['dtype']}, scale {spec['scale']:.6g}, {spec['mask']['family']}({mask})"


def _variant_text(variant: dict[str, Any]) -> str:
    title = f"variant {variant['target']} of {', '.join(variant['specs'])}: "
    title += f"{size(variant['bytes'])} in the file, {size(variant['raw_bytes'])} unpacked"
    programs = [
        [f"  {p['name']}", p["specialisation"], size(p["bytes"]), size(p["raw_bytes"])]
        for p in variant["programs"]
    ]
    needs = [(f"  needs {name}", _need(value)) for name, value in variant["requires"].items()]
    allowed = ", ".join(f"{name} {value:g}" for name, value in variant["tolerance"].items())
    return "\n".join([title, columns(programs), fields([*needs, ("  relative error", f"at most {allowed}")])])


def _need(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} of them" if len(value) > 12 else ", ".join(map(str, value)) or "none"
    return value if isinstance(value, str) else json.dumps(value)
