"""The picture is a PNG that shows ratios, and says what is missing to draw it."""

import os
import struct
import subprocess
import sys

import pytest
from matplotlib.image import imread

from aotpack.bench.plot import plot
from aotpack.bench.protocol import Timing
from aotpack.bench.results import Result, against
from aotpack.errors import OutputError

OURS = (0xD1, 0x49, 0x5B)
RIVAL = (0x8D, 0x99, 0xAE)


def result(name="step", **rivals):
    rows = against("forward", {"aotpack": Timing.of([1.0]), **rivals})
    facts = {"torch": "2.14.1", "torch_threads": 2, "batch": 1, "context": 512, "anchors": 64}
    return Result(name=name, measured="seconds", rows=tuple(rows), facts=facts)


def pixels(path, color):
    image = (imread(path)[:, :, :3] * 255).round().astype(int)
    return int((image == color).all(axis=2).sum())


def test_a_bar_is_as_long_as_its_ratio(tmp_path):
    path = tmp_path / "step.png"
    plot([result(them=Timing.of([4.0]))], path)
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
    assert imread(path).shape[:2] == (height, width)
    assert 3.5 < pixels(path, RIVAL) / pixels(path, OURS) < 4.5


def test_large_ratios_are_drawn_on_a_logarithmic_axis(tmp_path):
    path = tmp_path / "step.png"
    plot([result(them=Timing.of([1000.0]))], path)
    assert pixels(path, RIVAL) < 20 * pixels(path, OURS)


def test_a_rival_that_is_missing_has_no_bar(tmp_path):
    path = tmp_path / "step.png"
    plot([result(them="RuntimeError: not here")], path)
    assert pixels(path, RIVAL) == 0 < pixels(path, OURS)


def test_all_results_are_in_one_picture(tmp_path):
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    plot([result()], one)
    plot([result(), result("mask")], two)
    assert imread(two).shape[0] > 1.8 * imread(one).shape[0]


def test_a_picture_that_cannot_be_written_is_an_output_error(tmp_path):
    with pytest.raises(OutputError):
        plot([result()], tmp_path / "nowhere" / "step.png")


def test_without_matplotlib_nothing_is_measured(tmp_path):
    code = "import sys; sys.modules['matplotlib'] = None; from aotpack.cli import main; sys.exit(main())"
    command = [
        sys.executable,
        "-c",
        code,
        "bench",
        "step",
        "--package",
        "/nope",
        "--plot",
        str(tmp_path / "x"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert (done.returncode, done.stdout) == (5, "")
    assert "plots are drawn by matplotlib" in done.stderr
    assert 'pip install "aotpack[plot]"' in done.stderr
