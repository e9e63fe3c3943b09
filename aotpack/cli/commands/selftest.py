"""``aotpack selftest``: golden vectors on this machine."""

from __future__ import annotations

import math

import click

from aotpack.cli.console import Console, talking
from aotpack.cli.places import offline_option
from aotpack.cli.text import columns
from aotpack.errors import SelfTestError

__all__ = ["selftest"]


@click.command()
@click.argument("file")
@offline_option
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--again", is_flag=True, help="Run, whatever an earlier test here found.")
@talking
def selftest(console: Console, file: str, offline: bool, device: str, again: bool) -> int:
    """Run every spec of a package on its golden vectors, gradients and empty rows included.

    FILE may be a URL.

    What passed is remembered in the cache folder, for this package, device, driver and torch.
    """
    from aotpack.runtime.selftest import self_test

    report = self_test(file, device, remember=not again, offline=offline or None)
    rows = [
        {
            "spec": check.spec,
            "what": check.what,
            "error": check.error if math.isfinite(check.error) else str(check.error),
            "tolerance": check.tolerance,
            "passed": check.passed,
        }
        for check in report.checks
    ]
    data = {
        "path": file,
        "digest": report.digest,
        "device": report.device,
        "target": report.target,
        "passed": report.passed,
        "remembered": report.remembered,
        "checks": rows,
    }
    cells = [
        [
            check.spec,
            check.what,
            f"{check.error:.2e}",
            f"{check.tolerance:.0e}" if check.tolerance else "exactly 0",
            console.paint("passed", "green") if check.passed else console.paint("FAILED", "red"),
        ]
        for check in report.checks
    ]
    table = columns(cells, ["spec", "what", "relative error", "at most", ""])
    when = ", remembered from an earlier test" if report.remembered else ""
    console.show("aotpack.selftest/1", data, f"{report.target} on {report.device}{when}\n{table}")
    failed = sum(not check.passed for check in report.checks)
    if not failed:
        return 0
    console.say(
        f"aotpack: {failed} of {len(report.checks)} checks failed; do not train with this package here"
    )
    return SelfTestError.exit_code
