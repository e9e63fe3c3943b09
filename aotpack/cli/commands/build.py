"""``aotpack build``: from configs to one package."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from aotpack.build import BuildReport
from aotpack.cli.commands.tune import show_failures
from aotpack.cli.console import Console, talking
from aotpack.cli.progress import BuildProgress
from aotpack.cli.sources import default_output, read_sources
from aotpack.cli.text import columns, duration, size
from aotpack.cli.tuning import Tune, describe, given_records
from aotpack.errors import InputError
from aotpack.files import check_writable
from aotpack.spec import DTYPES, AttentionSpec

__all__ = ["build"]


@click.command()
@click.argument("sources", metavar="[NAME=]CONFIG|SPEC...", nargs=-1)
@click.option(
    "--check",
    type=click.Path(path_type=Path),
    help="Build this package again and compare, byte for byte; takes no other option than --jobs.",
)
@click.option(
    "--model",
    type=click.Path(path_type=Path),
    help="Instead of sources: a transformers model's folder or config.json, of any model.",
)
@click.option("--padded", is_flag=True, help="With --model: also for batches with padding.")
@click.option("--packed", is_flag=True, help="With --model: also for packed batches.")
@click.option(
    "-t", "--target", "targets", multiple=True, help="Device type; may be repeated.  [default: cpu]"
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="The package file.  [default: a file here, named after the config's folder]",
)
@click.option(
    "--shape",
    "shapes",
    metavar="BATCH,QUERY,KEY",
    multiple=True,
    help="CUDA: also programs for exactly these lengths; may be repeated.",
)
@click.option(
    "--template", is_flag=True, help="CUDA: torch's flex attention also where aotpack has kernels of its own."
)
@click.option(
    "--tuning",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="RECORD",
    help="CUDA: take kernel options from this tuning record before those that come with aotpack; repeatable.",
)
@click.option(
    "--tune", is_flag=True, help="CUDA: search kernel options on this machine's GPU first, and use them."
)
@click.option(
    "--record",
    type=click.Path(path_type=Path),
    help="With --tune: the record to write.  [default: PACKAGE.tuning.json]",
)
@click.option(
    "--candidates",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="With --tune: only build what is to be measured, into this folder; needs no GPU.",
)
@click.option(
    "-j",
    "--jobs",
    type=click.IntRange(min=1),
    help="Programs compiled at a time.  [default: this machine's cores]",
)
@click.option("--dtype", type=click.Choice(DTYPES), help="Instead of the config's.")
@click.option("--family", help="Mask family, instead of dflash.")
@click.option("--block-size", type=click.IntRange(min=1), help="Tokens of a draft block.")
@click.option("--window", type=click.IntRange(min=1), help="Tokens that sliding layers see.")
@talking
def build(
    console: Console,
    sources: tuple[str, ...],
    check: Path | None,
    model: Path | None,
    padded: bool,
    packed: bool,
    targets: tuple[str, ...],
    shapes: tuple[str, ...],
    template: bool,
    tuning: tuple[Path, ...],
    tune: bool,
    record: Path | None,
    candidates: Path | None,
    jobs: int | None,
    output: Path | None,
    **overrides: Any,
) -> int:
    """Compile the attention of drafters into one package.

    A source is a drafter's config.json, a folder that holds one, or a TOML spec file. Its specs are named
    after the layers' masks, "full" and "sliding"; NAME=SOURCE names them NAME.full and NAME.sliding.
    With --model they are what attn_implementation="aotpack" will ask for in training that model.

    --tune tries kernel options for one CUDA target, checks and measures each, writes a tuning record and
    builds with it. Where compiler and GPU are on two machines: build --tune --candidates FOLDER on the one,
    'aotpack tune FOLDER -o RECORD' on the other, then build --tuning RECORD.
    """
    from aotpack.build import build as compile_package

    if check is not None:
        others = (sources, model, padded, packed, targets, shapes, template, output, tuning, tune)
        if any((*others, record, candidates, *overrides.values())):
            raise InputError(
                "--check takes everything from the package",
                expected="--jobs alone beside it",
                found="other options as well",
            )
        _check(console, check, jobs)
        return 0
    _check_tune(tune, record, candidates, output)
    specs = _specs(sources, model, padded, packed, overrides)
    exact = [_shape(text) for text in shapes]
    records, code = given_records(tuning), 0
    search = Tune.of(specs, targets, template, jobs, records) if tune else None
    if search is not None and candidates is not None:
        console.show(
            "aotpack.build.candidates/1", *describe(candidates, search.candidates(console, candidates))
        )
        return 0
    path = output if output is not None else default_output(sources if model is None else [str(model)])
    if output is None:
        console.say(f"writing to {path}; choose another file with -o")
    for name, spec in specs.items():
        console.detail(f"spec {name}: {spec.to_json()}")
    if search is not None:
        place = record if record is not None else path.with_suffix(".tuning.json")
        for each in (path, place):
            check_writable(each)
        found = search.record(console, place)
        code = show_failures(console, found)
        if found.record.entries:
            records = replace(records, given={str(place): found.record, **records.given})
    with BuildProgress(console) as progress:
        report = compile_package(
            specs,
            targets or ("cpu",),
            path,
            shapes=exact,
            template=template,
            tuning=records,
            jobs=jobs,
            progress=progress,
        )
    data = _report(specs, report)
    console.show("aotpack.build/1", data, _text(data))
    return code


def _check_tune(tune: bool, record: Path | None, candidates: Path | None, output: Path | None) -> None:
    if not tune and (record is not None or candidates is not None):
        raise InputError("--record and --candidates are for --tune", remedy="add --tune")
    if candidates is not None and (record is not None or output is not None):
        raise InputError(
            "--candidates builds no package and writes no record", remedy="leave -o and --record out"
        )


def _specs(
    sources: tuple[str, ...], model: Path | None, padded: bool, packed: bool, overrides: dict[str, Any]
) -> dict[str, AttentionSpec]:
    if model is None:
        if padded or packed:
            raise InputError("--padded and --packed are for --model", remedy="name the model's folder")
        if not sources:
            raise InputError("nothing to build", expected="a config, a folder with one, or a spec file")
        return read_sources(sources, overrides)
    dtype = overrides.pop("dtype")
    if sources or any(overrides.values()):
        raise InputError(
            "--model takes everything from the model",
            expected="--padded, --packed and --dtype beside it",
            found="sources or options of drafters as well",
        )
    from aotpack.integrations.transformers import specs

    return specs(model, padded=padded, packed=packed, dtype=dtype)


def _check(console: Console, path: Path, jobs: int | None) -> None:
    from aotpack.build import check_build

    with BuildProgress(console) as progress:
        report = check_build(path, jobs=jobs, progress=progress)
    data = {"path": str(path), "digest": report.digest, "same": True, "seconds": round(report.seconds, 3)}
    console.show("aotpack.build.check/1", data, f"{path} is byte for byte what is built here again")


def _shape(text: str) -> tuple[int, int, int]:
    sizes = [int(part) for part in text.split(",") if part.strip().isdecimal()]
    if len(sizes) != 3 or text.count(",") != 2:
        raise InputError(
            "--shape takes three lengths", expected="BATCH,QUERY,KEY, such as 1,8192,12288", found=text
        )
    return sizes[0], sizes[1], sizes[2]


def _report(specs: dict[str, AttentionSpec], report: BuildReport) -> dict[str, Any]:
    return {
        "path": str(report.path),
        "digest": report.digest,
        "bytes": report.size,
        "seconds": round(report.seconds, 3),
        "specs": {name: spec.digest for name, spec in specs.items()},
        "targets": list(dict.fromkeys(stage.target for stage in report.stages)),
        "stages": [
            {
                "target": stage.target,
                "spec": stage.spec,
                "name": stage.name,
                "seconds": round(stage.seconds or 0.0, 3),
            }
            for stage in report.stages
        ],
    }


def _text(data: dict[str, Any]) -> str:
    return columns(
        [
            ["package", f"{data['path']}, {size(data['bytes'])}"],
            ["specs", ", ".join(data["specs"])],
            ["targets", ", ".join(data["targets"])],
            ["digest", data["digest"]],
            ["time", duration(data["seconds"])],
        ]
    )
