"""Prints how many lines each package has, and fails when a file or function outgrows what one can take in."""

import ast
import sys
from collections import Counter
from pathlib import Path

MAX_FILE = 600
LONG_FILE = 300
MAX_FUNCTION = 60


def main() -> int:
    """Lines include blank ones and comments."""
    packages: Counter[str] = Counter()
    failures = []
    for path in sorted(Path("triptych").rglob("*.py")):
        source = path.read_text()
        lines = source.count("\n")
        packages[path.parts[1] if len(path.parts) > 2 else "(top)"] += lines
        if lines > MAX_FILE:
            failures.append(f"{path}: {lines} lines, more than {MAX_FILE}")
        elif lines > LONG_FILE:
            print(f"{path}: {lines} lines; over {LONG_FILE}, so worth a look")
        failures += [f"{path}:{line}: {name} has {length} lines" for name, line, length in long_functions(source)]
    tests = sum(path.read_text().count("\n") for path in Path("tests").rglob("*.py"))
    for package, lines in packages.most_common():
        print(f"{lines:6} {package}")
    print(f"{packages.total():6} triptych, {tests} tests")
    print("\n".join(failures))
    return 1 if failures else 0


def long_functions(source: str) -> list[tuple[str, int, int]]:
    """(name, line, length) of functions longer than ``MAX_FUNCTION`` lines."""
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    lengths = ((node.name, node.lineno, (node.end_lineno or node.lineno) - node.lineno + 1) for node in nodes)
    return [found for found in lengths if found[2] > MAX_FUNCTION]


if __name__ == "__main__":
    sys.exit(main())
