"""Writes the table of fields beyond the served ones in docs/api-fields.md from ``triptych/api/field_table.py``. A test
fails when the page is out of date.

.venv/bin/python -m scripts.fields_doc
"""

from scripts.generated import DOCS, table, with_region
from triptych.api.field_rules import Alias, Hint, Rule, Rules, describe
from triptych.api.field_table import TABLE

PAGE = DOCS / "api-fields.md"


def page() -> str:
    """The page with its table as the code has it."""
    rows = [row for place, rules in TABLE.items() for row in _rows(place, rules)]
    return with_region(PAGE.read_text(), "fields", table(["in", "fields", "what becomes of them"], rows))


def _rows(place: str, rules: Rules) -> list[list[str]]:
    by_effect: dict[str, list[str]] = {}
    other_names: dict[str, list[str]] = {}
    for name, rule in rules.by_name.items():
        if isinstance(rule, Alias):
            other_names.setdefault(rule.target, []).append(f"`{name}`")
        else:
            by_effect.setdefault(_effect(rule), []).append(f"`{name}`")
    if rules.ignores_unknown:
        by_effect.setdefault(_effect(Hint()), []).append("all others")
    rows = [[place, ", ".join(names), effect] for effect, names in by_effect.items()]
    targets = [f"{', '.join(names)} → `{target}`" for target, names in other_names.items()]
    return [*rows, [place, "; ".join(targets), "Other names"]] if targets else rows


def _effect(rule: Rule) -> str:
    return describe(rule).removesuffix(".")


if __name__ == "__main__":
    PAGE.write_text(page())
