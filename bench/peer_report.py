"""Tables of ``bench/peers.py``'s result as Markdown: figures with their spread, ratios, and the project's goals.

    python -m bench.peer_report bench/results/peers-mid.json --accuracy bench/results/accuracy-smollm2.json

A row's figure in a round is the median of that round's requests. The tables give the median over the rounds, and in
brackets the least and the largest round. With results of ``bench.accuracy``, each row also says how far its weight
format is from float32, on the text model of those results.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STAGES = {"encode_ms": "encode (ms)", "prefill_ms": "prefill (ms)", "read_share": "weight bytes read ÷ bandwidth"}
"""What only Triptych's rows have."""
TITLES = {
    "ttft_ms": "time to first token (ms)",
    "tpot_ms": "time per token (ms)",
    "peak_mib": "peak memory (MiB)",
}
ACCURACY = {"kl_mean": "KL divergence", "top_1": "same token"}
"""From float32's distributions: the mean, and the share of tokens with the same likeliest one."""
GOAL_COLUMNS = ("Triptych", "figure", "÷ peer", "value", "goal", "met")
FOUR_BITS = ("Q4_0", "Q4_K_M")
REDUCED = ("float16", "bfloat16", "int8", "int4")


@dataclass(frozen=True)
class Goal:
    """A bound on a figure of Triptych's rows with one of ``weights``, divided by the best of a peer's rows."""

    figure: str
    weights: tuple[str, ...]
    bound: float
    peer: str = ""
    """Empty for a figure that is a share by itself."""
    peer_weights: tuple[str, ...] = ()
    """Empty for all of the peer's rows."""


GOALS = (
    Goal("ttft_ms", ("bfloat16",), 0.8, "vLLM", ("bfloat16",)),
    Goal("tpot_ms", ("bfloat16",), 0.5, "vLLM", ("bfloat16",)),
    Goal("tokens_per_second_8", ("bfloat16",), 1.3, "vLLM", ("bfloat16",)),
    Goal("tokens_per_second_16", ("bfloat16",), 1.3, "vLLM", ("bfloat16",)),
    Goal("ttft_ms", ("int8",), 0.6, "vLLM", ("bfloat16",)),
    Goal("tokens_per_second_8", ("int8",), 1.8, "vLLM", ("bfloat16",)),
    Goal("tpot_ms", ("float16",), 0.7, "llama.cpp", ("F16",)),
    Goal("tpot_ms", ("int8",), 0.7, "llama.cpp", ("Q8_0",)),
    Goal("tpot_ms", ("int4",), 0.8, "llama.cpp", FOUR_BITS),
    Goal("ttft_ms", REDUCED, 0.5, "llama.cpp"),
    Goal("tokens_per_second_8", REDUCED, 2.0, "llama.cpp"),
    Goal("read_share", ("int4",), 0.6),
    Goal("read_share", ("int8",), 0.7),
    Goal("read_share", ("bfloat16",), 0.75),
)


def higher_is_better(figure: str) -> bool:
    return not figure.endswith(("_ms", "_mib"))


def title(figure: str) -> str:
    if figure.startswith("tokens_per_second_"):
        return f"output tokens/s, {figure.rpartition('_')[2]} at a time"
    return TITLES.get(figure) or STAGES[figure]


def served_figures(found: dict[str, Any]) -> list[str]:
    """Names of the figures that served rows have. Older results have no peak memory."""
    crowds = [f"tokens_per_second_{level}" for level in found["load"]["at_a_time"]]
    has_memory = any("peak_mib" in run.get("figures", {}) for run in found["runs"])
    return ["ttft_ms", "tpot_ms", *crowds, *(["peak_mib"] if has_memory else [])]


def summary(found: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """By row and figure: the median over rounds, the least, the largest, and how many rounds there are."""
    result: dict[str, dict[str, dict[str, float]]] = {}
    for name in found["rows"]:
        runs = [run["figures"] for run in found["runs"] if run["row"] == name and "figures" in run]
        result[name] = {}
        for figure in (*served_figures(found), *STAGES):
            values = [_of_round(run[figure]) for run in runs if figure in run]
            if values:
                result[name][figure] = {
                    "p50": statistics.median(values),
                    "low": min(values),
                    "high": max(values),
                    "rounds": len(values),
                }
    return result


def _of_round(values: float | list[float]) -> float:
    return statistics.median(values) if isinstance(values, list) else values


def goals(found: dict[str, Any], wanted: Sequence[Goal] = GOALS) -> list[dict[str, Any]]:
    """Each goal for each of Triptych's rows that it is about, if that row and its peer have the figure."""
    figures = summary(found)
    result = []
    for goal in wanted:
        peers = _rows(found, goal.peer, goal.peer_weights) if goal.peer else []
        best = _best(figures, peers, goal.figure)
        for name in _rows(found, "Triptych", goal.weights):
            ours = figures[name].get(goal.figure)
            if ours is None or (goal.peer and best is None) or _is_impossible(goal.figure, ours["p50"]):
                continue
            value = ours["p50"] / (figures[best][goal.figure]["p50"] if best else 1.0)
            met = value >= goal.bound if higher_is_better(goal.figure) else value <= goal.bound
            result.append(
                {
                    "row": name,
                    "figure": goal.figure,
                    "peer": best or "",
                    "value": round(value, 3),
                    "bound": goal.bound,
                    "met": met,
                }
            )
    return result


def _is_impossible(figure: str, value: float) -> bool:
    """Whether a figure shows that what it is divided by was measured too low."""
    return figure == "read_share" and value > 1.0


def with_accuracy(found: dict[str, Any], results: Sequence[Path]) -> dict[str, Any]:
    """Return a result with what ``bench.accuracy`` wrote of text models; of formats in several files, the last counts.
    Without files, the result itself."""
    if not results:
        return found
    texts = [json.loads(path.read_text())["text"] for path in results]
    formats = {name: figures for text in texts for name, figures in text["formats"].items()}
    return found | {"accuracy": {"models": sorted({text["model"] for text in texts}), "formats": formats}}


def accuracy_of(found: dict[str, Any], row: dict[str, Any]) -> dict[str, float]:
    """Return the accuracy of a row's weight format; nothing if it wasn't measured."""
    name = row["weights"] if row["engine"] == "Triptych" else f"{row['engine']} {row['weights']}"
    measured: dict[str, float] = found.get("accuracy", {}).get("formats", {}).get(name, {})
    return measured


def _rows(found: dict[str, Any], engine: str, weights: Sequence[str]) -> list[str]:
    return [
        name
        for name, row in found["rows"].items()
        if row["engine"] == engine and (not weights or row["weights"] in weights)
    ]


def _best(figures: dict[str, Any], names: Sequence[str], figure: str) -> str | None:
    having = [name for name in names if figure in figures[name]]
    choose = max if higher_is_better(figure) else min
    return choose(having, key=lambda name: figures[name][figure]["p50"], default=None)


def markdown(found: dict[str, Any]) -> str:
    """Return the whole report."""
    return (
        "\n".join(
            [*_heading(found), *_figures(found), *_stages(found), *_ratios(found), *_goals(found), *_commands(found)]
        )
        + "\n"
    )


def _heading(found: dict[str, Any]) -> Iterator[str]:
    load, model = found["load"], found["model"]
    yield f"# {model['name']} beside other engines"
    yield ""
    yield from circumstances(found)
    yield f"- model: {model['parameters'] / 1e6:.0f} million parameters, stored in {model['dtype']}"
    pictures = f"{load['images']} image of {load['width']} × {load['height']} and " if load["images"] else ""
    yield f"- load: {pictures}{load['words']} words in, {load['output_tokens']} tokens out, greedy"
    yield (
        f"- rounds: {load['rounds']}, of {load['requests']} requests alone and {load['crowd_requests']} at each "
        f"number at a time; {found['date']}"
    )
    yield ""


def circumstances(found: dict[str, Any]) -> Iterator[str]:
    """Machine and versions."""
    machine = found["machine"]
    flags = ", ".join(machine["instructions"]) or "none of those looked for"
    yield f"- machine: {machine['cores']} cores, {machine['processor']}, {machine['memory_gib']} GiB; {flags}"
    yield f"- versions: {', '.join(f'{name} {version}' for name, version in found['versions'].items())}"


def _figures(found: dict[str, Any]) -> Iterator[str]:
    names, figures = served_figures(found), summary(found)
    accuracies = ACCURACY if "accuracy" in found else {}
    yield from header(["engine", "settings", *map(title, names), "prompt tokens", *accuracies.values()])
    for name, row in found["rows"].items():
        tokens = {run["figures"].get("prompt_tokens") for run in _measured(found, name)} - {None}
        cells = [spread(figures[name].get(figure)) for figure in names]
        counted = ", ".join(f"{count:g}" for count in sorted(tokens)) or "–"
        accuracy = accuracy_of(found, row)
        cells += [counted, *(f"{accuracy[name]:g}" if name in accuracy else "–" for name in accuracies)]
        yield f"| {row['engine']} | {code(row['settings'])} | {' | '.join(cells)} |"
    yield ""
    if accuracies:
        models = ", ".join(found["accuracy"]["models"])
        yield f"- {' and '.join(accuracies.values())}: of the weight format, on {models}"
    for note in notes(found):
        yield f"- {note}"
    yield ""


def _measured(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [run for run in found["runs"] if run["row"] == name and "figures" in run]


def notes(found: dict[str, Any]) -> Iterator[str]:
    """What the figures lack: peers left out, rows that failed, answers of another length, and errors."""
    yield from found["left_out"]
    for run in found["runs"]:
        where = f"{run['row']}, round {run['round'] + 1}"
        if "failed" in run:
            yield f"{where}: failed: {run['failed']}"
            continue
        if _is_impossible("read_share", run["figures"].get("read_share", 0.0)):
            yield f"{where}: weights were read faster than the bandwidth that was measured, so their share says nothing"
        if short := run["figures"]["short"]:
            yield f"{where}: {short} answers had another number of tokens than asked for"
        if errors := run["figures"]["errors"]:
            yield f"{where}: {len(errors)} requests failed, the first with: {errors[0]}"


def spread(figure: dict[str, float] | None) -> str:
    """A cell: the median, and the range if there is more than one round."""
    if figure is None:
        return "–"
    if figure["rounds"] < 2:
        return number(figure["p50"])
    return f"{number(figure['p50'])} ({number(figure['low'])}–{number(figure['high'])})"


def number(value: float) -> str:
    """Three significant digits, and all that are before the point."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f}"


def _stages(found: dict[str, Any]) -> Iterator[str]:
    figures = summary(found)
    rows = [name for name in _rows(found, "Triptych", ()) if figures[name].keys() & STAGES]
    if not rows:
        return
    yield from ["## Triptych by stage", ""]
    yield from header(["settings", *STAGES.values()])
    for name in rows:
        cells = [spread(figures[name].get(figure)) for figure in STAGES]
        yield f"| {code(found['rows'][name]['settings'])} | {' | '.join(cells)} |"
    yield ""


def _ratios(found: dict[str, Any]) -> Iterator[str]:
    figures = summary(found)
    peers = [name for name, row in found["rows"].items() if row["engine"] != "Triptych" and figures[name]]
    if not peers:
        return
    yield from ["## Triptych ÷ peer", ""]
    yield from header(["settings", "figure", *peers])
    for name in _rows(found, "Triptych", ()):
        for figure in served_figures(found):
            if figure not in figures[name]:
                continue
            ours = figures[name][figure]["p50"]
            theirs = [figures[peer].get(figure) for peer in peers]
            cells = [f"{ours / their['p50']:.2f}" if their else "–" for their in theirs]
            yield f"| {code(found['rows'][name]['settings'])} | {title(figure)} | {' | '.join(cells)} |"
    yield ""


def _goals(found: dict[str, Any]) -> Iterator[str]:
    reached = goals(found)
    if not reached:
        return
    yield from ["## Goals", ""]
    yield from header(GOAL_COLUMNS)
    for goal in reached:
        yield f"| {' | '.join(goal_cells(found, goal))} |"
    yield ""


def goal_cells(found: dict[str, Any], goal: dict[str, Any]) -> list[str]:
    """Settings, figure, peer, value, bound, and whether it is met."""
    sign = "≥" if higher_is_better(goal["figure"]) else "≤"
    settings = code(found["rows"][goal["row"]]["settings"])
    cells = [settings, title(goal["figure"]), goal["peer"] or "–", f"{goal['value']:.2f}"]
    return [*cells, f"{sign} {goal['bound']:g}", "yes" if goal["met"] else "no"]


def _commands(found: dict[str, Any]) -> Iterator[str]:
    yield from ["## Commands", ""]
    for row in found["rows"].values():
        if "command" in row:
            yield f"- {code(row['command'])}"


def header(names: Sequence[str]) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield f"|{' --- |' * len(names)}"


def code(settings: str) -> str:
    return f"`{settings}`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="JSON that bench.peers wrote with --out")
    parser.add_argument("--accuracy", type=Path, nargs="+", default=[], help="JSON that bench.accuracy wrote")
    options = parser.parse_args()
    print(markdown(with_accuracy(json.loads(options.result.read_text()), options.accuracy)), end="")


if __name__ == "__main__":
    main()
