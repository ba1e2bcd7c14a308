"""The import graph between the files of the package, and what must never be in it.

``python -m tests.helpers.import_graph`` prints every file with the files that it imports, lowest first, and fails on

* a circle between files; imports inside functions and under ``TYPE_CHECKING`` count as any other,
* a module that its package shadows by a function or class of the same name,
* a file of more than 300 lines that is not a kernel.
"""

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import grimp

PACKAGE = "kvpress_prob"
MOST_LINES = 300
KERNELS = ("triton_kernel",)
"""Modules that may be longer: a kernel is one function, and no part of it can be read alone."""


def imports_of(package: str) -> dict[str, set[str]]:
    """Every module of a package, and the modules of the package that it names in an import anywhere in its file."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=False, cache_dir=None)
    return {module: graph.find_modules_directly_imported_by(module) for module in sorted(graph.modules)}


def drawn(imports: dict[str, set[str]]) -> list[str]:
    """One line a module, after all modules that it imports.

    Raises
    ------
    ValueError
        For a circle; names its modules.
    """
    try:
        order = list(TopologicalSorter({module: sorted(found) for module, found in imports.items()}).static_order())
    except CycleError as error:
        raise ValueError(f"imports must not run in a circle, got {' <- '.join(error.args[1])}") from error
    width = max(map(len, order))
    return [f"{module:<{width}}  {' '.join(sorted(imports[module]))}".rstrip() for module in order]


def shadowed(package: str) -> list[str]:
    """Modules whose name in their package is something else: ``from p.m import m`` in ``p/__init__.py``."""
    found = []
    root = _folder(package)
    for file in sorted(root.rglob("__init__.py")):
        modules = {
            path.stem for path in file.parent.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
        }
        within = ".".join([package, *file.parent.relative_to(root).parts])
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module != within:
                found += [f"{within}.{name.name}" for name in node.names if (name.asname or name.name) in modules]
    return found


def too_long(package: str) -> list[str]:
    """Files of more than ``MOST_LINES`` lines, with their lines."""
    sizes = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in _folder(package).rglob("*.py")}
    return [f"{file} ({n} lines)" for file, n in sorted(sizes.items()) if n > MOST_LINES and file.stem not in KERNELS]


def _folder(package: str) -> Path:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"package must be importable, got {package!r}")
    return Path(spec.origin).parent


def main(package: str = PACKAGE) -> int:
    """Print the graph; 1 if something is in it that must not be."""
    faults = [f"{name} is shadowed by what its package calls the same" for name in shadowed(package)]
    faults += [f"{file} is longer than {MOST_LINES}" for file in too_long(package)]
    try:
        print(*drawn(imports_of(package)), sep="\n")
    except ValueError as error:
        faults.append(str(error))
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
