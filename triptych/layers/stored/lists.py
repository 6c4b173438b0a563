"""Compares a config's lists of modules that are quantized, or aren't, with what the checkpoint holds, which decides.
Libraries name modules as different versions of transformers do, and abbreviate them in several ways."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from time import monotonic

from triptych.layers.stored.format import Section

LEFT_ALONE = ("modules_to_not_convert", "ignored_layers", "llm_int8_skip_modules", "ignore", "exclude_modules")
"""Settings that list modules that aren't quantized: names or parts of them, patterns of shells or, after ``re:``,
regular expressions."""
NOT = "-:"
"""What regular expressions for such modules begin with in ``dynamic`` of GPTQ."""
RENAMED = (("model.language_model.", "language_model.model."), ("model.visual.", "visual."), ("model.", ""))
"""Beginnings of names that depend on the version of transformers."""
SHELL = str.maketrans({".": r"\.", "*": ".*", "?": ".", "!": "^"})
"""Makes a regular expression of a shell's pattern; ``!`` occurs in sets alone."""
LONGEST = 200
"""Characters of a pattern, and of a name, that are compared."""
SECONDS = 1.0
"""After that long, other modules aren't compared."""
NAMED = 3


@dataclass(frozen=True)
class Disagreements:
    """Modules of which config and tensors say different things."""

    left_alone: Sequence[str]
    """Quantized ones that the config leaves alone."""
    not_quantized: Sequence[str]
    """Others that the config doesn't leave alone, where the same modules of other layers are quantized."""

    def __str__(self) -> str:
        parts = [
            f"{_listed(names)} {what}"
            for names, what in (
                (self.left_alone, "aren't quantized, but the checkpoint has them quantized"),
                (self.not_quantized, "are quantized, but the checkpoint doesn't have them quantized"),
            )
            if names
        ]
        return f"config.json says that {', and that '.join(parts)}: the checkpoint's tensors decide"


def disagreements(section: object, tensors: Iterable[str], markers: Sequence[str]) -> Disagreements | None:
    """Return what the config's ``section`` says of other modules than the checkpoint's ``tensors``, their names;
    ``markers`` are last parts of the names of quantized modules' tensors. None if they agree, or a list isn't
    understood."""
    if not isinstance(section, Mapping) or (is_left := _matcher(_patterns(section))) is None:
        return None
    ends = tuple(f".{marker}" for marker in markers)
    names = list(tensors)
    quantized = {name.removesuffix(end) for name in names for end in ends if name.endswith(end)}
    places = {_place(name) for name in quantized}
    plain = {name.removesuffix(".weight") for name in names if name.endswith(".weight")} - quantized
    dense = [name for name in sorted(plain) if _place(name) in places]
    until = monotonic() + SECONDS
    left_alone = [name for name in takewhile(lambda _: monotonic() < until, sorted(quantized)) if is_left(name)]
    not_quantized = [name for name in takewhile(lambda _: monotonic() < until, dense) if not is_left(name)]
    return Disagreements(left_alone, not_quantized) if left_alone or not_quantized else None


def _patterns(section: Section) -> Iterator[str]:
    """Yield what the config says of modules that aren't quantized."""
    for name in LEFT_ALONE:
        listed = section.get(name)
        yield from (one for one in listed if isinstance(one, str)) if isinstance(listed, list) else ()
    dynamic = section.get("dynamic")
    for key in dynamic if isinstance(dynamic, Mapping) else ():
        if key.startswith(NOT):
            yield f"re:{key.removeprefix(NOT)}"


def _matcher(patterns: Iterable[str]) -> Callable[[str], bool] | None:
    """Return what says whether one of the patterns is for a module; None if a pattern isn't understood."""
    names: set[str] = set()
    regular: list[str] = []
    for pattern in patterns:
        if len(pattern) > LONGEST:
            return None
        if pattern.startswith("re:"):
            regular.append(pattern.removeprefix("re:"))
        elif "*" in pattern:
            regular.append(pattern.translate(SHELL) + r"(?:\..*)?$")
        else:
            names.add(pattern.strip("."))
    if (begins := _compiled(regular)) is None:
        return None

    def matches(module: str) -> bool:
        return len(module) <= LONGEST and any(
            any(part in names for part in _parts(name)) or begins(name) for name in _spelled(module)
        )

    return matches


def _compiled(patterns: Sequence[str]) -> Callable[[str], bool] | None:
    """Return what says whether a text begins as one of the regular expressions says; None if one is invalid."""
    from pydantic_core import SchemaError, SchemaValidator, core_schema

    if not patterns:
        return lambda _: False
    # Rust's, which don't backtrack: time is linear in the text, and the size of all together is bounded.
    whole = "|".join(f"(?:{one})" for one in patterns)
    try:
        return SchemaValidator(core_schema.str_schema(pattern=f"^(?:{whole})")).isinstance_python
    except SchemaError:
        return None


def _spelled(name: str) -> Iterator[str]:
    """Yield a module's names in different versions of transformers."""
    yield name
    for one, other in RENAMED:
        if name.startswith(one):
            yield other + name.removeprefix(one)
        if other and name.startswith(other):
            yield one + name.removeprefix(other)


def _parts(name: str) -> Iterator[str]:
    """Yield every run of a name's parts: ``a.b``, ``a`` and ``b`` of ``a.b``."""
    parts = name.split(".")
    return (".".join(parts[first:last]) for first in range(len(parts)) for last in range(first + 1, len(parts) + 1))


def _place(name: str) -> str:
    """Return a module's name without the numbers of layers and experts."""
    return ".".join("#" if part.isdigit() else part for part in name.split("."))


def _listed(names: Sequence[str]) -> str:
    others = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + others
