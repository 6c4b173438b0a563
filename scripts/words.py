"""Fail on words that the project no longer uses, on class names that are defined twice, and on docstrings that don't
say what they are about.

The vocabulary is the field's (docs/decisions/0026-plain-words.md). A word is listed here once it has been replaced
throughout; its entry names what to write instead.
"""

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

GONE = {
    r"front[ -]?doors?": "frontend",
    r"in the house": "admitted, in flight",
    r"in hand": "in flight",
    r"head of the line": "head of the queue",
    r"whose turn it is": "the next in the queue",
    r"(Encode|Language|Prefill|Decode|Sending)Host": "EncodeLoop, EngineLoop, SenderLoop",
    r"Sequence as Rows": "rename the class, not the standard library's",
    r"(Patch)?TowerFamily": "ModelAdapter",
    r"TowerInput": "EncoderInput",
    r"ThoughtSplitter": "ReasoningParser",
    r"doorkeepers?": "authenticator",
    r"misfits?": "incompatibility",
    r"laps(e|es|ed|ing)": "lose the lease, on_lease_lost",
    r"shortlists?": "pruned head",
    r"untold": "pending, unsent",
    r"anew": "again",
    r"shall": "must, will",
    r"so many": "the number",
    r"as many as": "up to, at most",
    r"nobody|somebody|anybody|everybody|whoever": "name the subject",
    r"foretold": "predicted",
    r"(is|are) told (so|of)": "is rejected, receives, is sent",
    r"prefillers?": "prefill instance",
    r"named[ -]media[ -]mb": "mm_uuid_cache_mb",
    r"max[ -]held[ -]mb": "max_inflight_mb",
    r"queue[ -]per[ -]callers?": "max_queue_per_client",
}
"""Regular expressions of whole words, in any case, and what to write instead."""

EXEMPT = (
    "LICENSE",
    "CHANGELOG.md",  # lists old names beside new ones
    "docs/decisions/0026-plain-words.md",
    "scripts/words.py",
    "tests/test_words.py",
    "tests/cli/test_flags.py",
    "tests/cli/test_help.py",  # lists them as well
    "bench/results/",
    "triptych/demo/model/",
)
SUFFIXES = {".py", ".md", ".toml", ".yml", ".json", ".c", ".h", ""}

_EACH = "|".join(rf"(?P<w{number}>{word})" for number, word in enumerate(GONE))
_GONE = re.compile(rf"\b(?:{_EACH})\b", re.IGNORECASE)  # alternatives are tried only where a word begins

_VAGUE = re.compile(r'\s*"""(Of|As|As in|As of)\b')


def found_in(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield (line, word, what to write instead) for each word of the list, also inside snake_case names."""
    for number, line in enumerate(text.splitlines(), start=1):
        # an underscore separates words
        for match in _GONE.finditer(line.replace("_", " ")):
            yield number, match[0], list(GONE.values())[int(str(match.lastgroup)[1:])]


def vague(sources: dict[str, str]) -> Iterator[str]:
    """Yield a line for each docstring that says whose a value is, or where to read on, in place of what it is."""
    for path, source in sources.items():
        for number, line in enumerate(source.splitlines(), start=1):
            if match := _VAGUE.match(line):
                yield f"{path}:{number}: a docstring begins with {match[1]!r}; say what it is"


def defined_twice(sources: dict[str, str]) -> Iterator[str]:
    """Yield a line for each class name that is defined in several places."""
    places = defaultdict(list)
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    for name, where in sorted(places.items()):
        if len(where) > 1:
            yield f"class {name} is defined in {' and in '.join(where)}"


def main() -> int:
    """Check every file that git tracks, and its path."""
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split("\n")
    paths = [Path(name) for name in listed if name and not name.startswith(EXEMPT)]
    texts = {str(path): path.read_text() for path in paths if path.suffix in SUFFIXES and path.is_file()}
    failures = [
        f"{path}:{number}: {word!r}; write: {instead}"
        for path, text in texts.items()
        for number, word, instead in (*found_in(text), *found_in(path))
    ]
    package = {path: text for path, text in texts.items() if path.startswith("triptych/") and path.endswith(".py")}
    failures += [*defined_twice(package), *vague(package)]
    print("\n".join(failures) or "no word of the list, no class name twice, no vague docstring")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
