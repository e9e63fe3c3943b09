"""``aotpack build``: from configs to one package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from aotpack.build import BuildReport
from aotpack.cli.console import Console, talking
from aotpack.cli.progress import BuildProgress
from aotpack.cli.sources import default_output, read_sources
from aotpack.cli.text import columns, duration, size
from aotpack.errors import InputError
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
    jobs: int | None,
    output: Path | None,
    **overrides: Any,
) -> None:
    """Compile the attention of drafters into one package.

    A source is a drafter's config.json, a folder that holds one, or a TOML spec file. Its specs are named
    after the layers' masks, "full" and "sliding"; NAME=SOURCE names them NAME.full and NAME.sliding.
    With --model they are what attn_implementation="aotpack" will ask for in training that model.
    """
    from aotpack.build import build as compile_package

    if check is not None:
        others = (sources, model, padded, packed, targets, shapes, template, output, *overrides.values())
        if any(others):
            raise InputError(
                "--check takes everything from the package",
                expected="--jobs alone beside it",
                found="other options as well",
            )
        _check(console, check, jobs)
        return
    specs = _specs(sources, model, padded, packed, overrides)
    exact = [_shape(text) for text in shapes]
    path = output if output is not None else default_output(sources if model is None else [str(model)])
    if output is None:
        console.say(f"writing to {path}; choose another file with -o")
    for name, spec in specs.items():
        console.detail(f"spec {name}: {spec.to_json()}")
    with BuildProgress(console) as progress:
        report = compile_package(
            specs,
            targets or ("cpu",),
            path,
            shapes=exact,
            template=template,
            jobs=jobs,
            progress=progress,
        )
    data = _report(specs, report)
    console.show("aotpack.build/1", data, _text(data))


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
