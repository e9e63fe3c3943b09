"""``aotpack demo``: build, load and train, then a table."""

from __future__ import annotations

import click

from aotpack.cli.console import Console, talking

__all__ = ["demo"]


@click.command()
@talking
def demo(console: Console) -> None:
    """Build a small drafter's attention, load it and train with it from threads, for a minute or two."""
    raise NotImplementedError
