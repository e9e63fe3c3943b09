"""The group of all commands."""

from __future__ import annotations

import click

import aotpack
from aotpack.cli.commands.bench import bench
from aotpack.cli.commands.build import build
from aotpack.cli.commands.cache import cache
from aotpack.cli.commands.demo import demo
from aotpack.cli.commands.doctor import doctor
from aotpack.cli.commands.explain import explain
from aotpack.cli.commands.inspect import inspect
from aotpack.cli.commands.keygen import keygen
from aotpack.cli.commands.lock import lock
from aotpack.cli.commands.pull import pull
from aotpack.cli.commands.push import push
from aotpack.cli.commands.selftest import selftest
from aotpack.cli.commands.sign import sign
from aotpack.cli.commands.tune import tune
from aotpack.cli.commands.verify import verify

__all__ = ["app"]

_EXIT_CODES = """\b
Exit codes: 0 done, 1 internal error, 2 usage, 3 no variant for this machine,
4 integrity or signature, 5 environment or ABI, 6 not cached while offline,
7 self-test failed, 130 interrupted."""


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXIT_CODES)
@click.version_option(aotpack.__version__, message="aotpack %(version)s")
def app() -> None:
    """Compile a drafter's attention once per device type; train with it anywhere."""


for _command in (
    build,
    inspect,
    lock,
    explain,
    verify,
    selftest,
    doctor,
    push,
    pull,
    cache,
    keygen,
    sign,
    demo,
    bench,
    tune,
):
    app.add_command(_command)
