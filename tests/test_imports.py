"""Import rules that a linter of layers cannot say: what fresh processes load, and what sources may name."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "aotpack"
COMPILER = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.export")
SERIALIZERS = ("pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib")
WITHOUT_TORCH = ("errors", "spec", "drafter", "targets", "package", "store", "trust", "tuning")
WITHOUT_COMPILER = ("runtime", "integrations", "masks", "scores", "dense", *WITHOUT_TORCH)
HOMES = {
    "click": ("cli",),
    "cryptography": ("trust",),
    "fsspec": ("store",),
    "transformers": ("drafter", "integrations", "demo"),
}


def layer(path: Path) -> str:
    """First part of a module's name below aotpack: ``runtime`` for aotpack/runtime/x.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module) of every import in a file, in functions too, but not under ``TYPE_CHECKING``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    unseen: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            unseen.update(child for part in node.body for child in ast.walk(part))
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def offences(layers: tuple[str, ...] | None, modules: tuple[str, ...]) -> list[str]:
    """``file:line module`` for each import of a module, or of one below it, in the named layers."""
    return [
        f"{path.relative_to(PACKAGE.parent)}:{line} {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if layers is None or layer(path) in layers
        for line, name in imported(path)
        if any(name == module or name.startswith(module + ".") for module in modules)
    ]


def test_nothing_serialises_code():
    assert offences(None, SERIALIZERS) == []


def test_specs_and_packages_are_read_without_torch():
    assert offences(WITHOUT_TORCH, ("torch",)) == []


def test_the_runtime_names_no_compiler_and_no_builder():
    assert offences(WITHOUT_COMPILER, (*COMPILER, "aotpack.build")) == []


@pytest.mark.parametrize("module", HOMES)
def test_a_dependency_stays_in_its_home(module):
    everywhere = {layer(path) for path in PACKAGE.rglob("*.py")}
    assert offences(tuple(everywhere - set(HOMES[module])), (module,)) == []


@pytest.mark.parametrize("module", ["cryptography", "transformers", "fsspec"])
def test_an_optional_dependency_is_imported_where_it_is_used(module):
    at_import = [
        f"{path.name}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if layer(path) in {"drafter", "integrations", "store", "trust"}
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom) and module in ast.unparse(node)
    ]
    assert at_import == []


def loaded_after(statement: str) -> set[str]:
    """Names in ``sys.modules`` of a fresh process after a statement."""
    code = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "name", ["errors", "spec", "drafter", "targets", "package", "store", "trust", "tuning"]
)
def test_a_fresh_process_imports_it_without_torch(name):
    if importlib.util.find_spec(f"aotpack.{name}") is None:
        pytest.skip(f"aotpack.{name} is not there")
    heavy = {"torch", "transformers", "click", "cryptography", "fsspec"}
    assert loaded_after(f"import aotpack.{name}") & heavy == set()


@pytest.mark.parametrize(
    "statement",
    [
        "import aotpack",
        "from aotpack import load, no_tracing",
        "import aotpack.integrations.distributed",
        "import aotpack.integrations.transformers",
    ],
)
def test_a_fresh_process_imports_the_public_names_without_a_compiler(statement):
    new = loaded_after(statement) - loaded_after("import torch")
    assert sorted(name for name in new if name.startswith(COMPILER)) == []
