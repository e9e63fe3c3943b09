"""demo prints what the demo found; what it does is tested with it."""

import json

import pytest

import aotpack.demo.run
from aotpack.cli import main

FOUND = {
    "schema": "aotpack.demo/1",
    "package_bytes": 529_000,
    "targets": ["cpu-x86_64-v3"],
    "build_s": 41.5,
    "load_ms": 9.5,
    "first_step_ms": 120.0,
    "threads": 2,
    "traces": 0,
    "max_rel_error": {"out": 0.001, "dq": 0.002, "dk": 0.002, "dv": 0.002},
    "loss": {"first": 5.0, "last": 2.5},
}


@pytest.fixture
def asked(monkeypatch):
    """What the command asked the demo for."""
    given = {}

    def run_demo(output=None, **options):
        given.update(options, output=output)
        options["on_step"](10, 3.21)
        return dict(FOUND)

    monkeypatch.setattr(aotpack.demo.run, "run_demo", run_demo)
    return given


def test_the_object_is_the_demos_own(asked, capsys):
    assert main(["demo", "--json", "--threads", "2", "--steps", "20"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == FOUND
    assert said.err == "step 10  loss 3.210\n"
    assert (asked["threads"], asked["steps"], asked["output"]) == (2, 20, None)


def test_the_table_is_for_people(asked, capsys):
    assert main(["demo", "-q"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert "5.000 to 2.500, 50% less" in said.out
    assert "steps" not in asked
