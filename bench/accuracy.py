"""How far each weight format is from float32: on released weights, beside llama.cpp's, and on the demo model.

    python -m bench.gguf_checkpoint SmolLM2-135M-Instruct.Q4_1.gguf /tmp/smollm2
    python -m bench.accuracy /tmp/smollm2 --gguf SmolLM2-135M-Instruct.Q4_1.gguf --llama-cpp DIR \\
        --out bench/results/accuracy.json --markdown accuracy.md

Text: the first tokens of each of ``passages``, in excerpts of ``CONTEXT`` tokens, scored after every token. Demo model:
the distributions at the tokens of right answers to questions that it wasn't trained on, each format with its own
tower's embeddings, and its own answers over HTTP.

A GGUF file in the folder's place is compared as it is, by both engines: ``python -m bench.accuracy FILE.gguf
--formats "as stored" --llama-cpp DIR --questions 0``.

llama.cpp's files are made from ``--gguf``, first in float16, whose weights are then those of the checkpoint folder.
They are compared with our float32, token by token. DIR has the sources of llama-cpp-python, whose binding is used, and
in ``bin`` the libraries that were built from them.
"""

import argparse
import asyncio
import hashlib
import importlib
import io
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.formats import FORMATS
from bench.measuring import like_an_instance, report
from bench.scoring import Divergence, Excerpt, Scorer
from demo.accuracy import answers_over_http
from demo.questions import EVALUATION_SEEDS, Example, make_example
from triptych.checkpoint.config_files import load_config, load_preprocessor_config, load_video_config
from triptych.checkpoint.gguf.file import GgufFile, read_gguf
from triptych.checkpoint.gguf.folder import gguf_folder
from triptych.config import EngineConfig
from triptych.demo import MODEL_DIR
from triptych.measure.machine import machine
from triptych.models.registry import family_of, resolve
from triptych.prompt.prompt import PromptBuilder

ALL_FORMATS = FORMATS | {
    "float16, KV cache in int8": {"dtype": "float16", "kv_cache_dtype": "int8"},
    "int8, KV cache in int8": {"quantization": "int8", "kv_cache_dtype": "int8"},
    "int4, KV cache in int8": {"quantization": "int4", "kv_cache_dtype": "int8"},
    "as stored": {},
}
"""Also those whose speed other benchmarks measure; the last one is for GGUF files."""
REPOSITORY = Path(__file__).parents[1]
REFERENCE = "float32"
CONTEXT = 512
EXCERPTS = 1
"""Of each passage."""
GGUF_FORMATS = ("F16", "Q8_0", "Q5_K_M", "Q4_K_M", "Q4_0")
COLUMNS = {"kl_mean": "KL mean", "kl_p99": "KL 99 %", "top_1": "same token"}

Score = Callable[[Excerpt], Tensor]
"""Returns log probabilities, float32 [S, vocabulary]."""


def passages() -> dict[str, str]:
    """Return English prose, questions and answers, and code: from this repository and from Python's library."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    code = importlib.import_module("textwrap").__file__
    return {
        "Python's reference: class, assignment": topics["class"] + topics["assignment"],
        "Python's reference: formatstrings": topics["formatstrings"],
        "Python's textwrap.py": Path(code or "").read_text(),
        "docs/request.md": (REPOSITORY / "docs/request.md").read_text(),
        "docs/troubleshooting.md": (REPOSITORY / "docs/troubleshooting.md").read_text(),
        "LICENSE": (REPOSITORY / "LICENSE").read_text(),
    }


def text_excerpts(folder: Path) -> list[Excerpt]:
    tokenizer = PromptBuilder(folder).tokenizer
    rows = [torch.tensor(tokenizer.encode(text)[: EXCERPTS * CONTEXT]) for text in passages().values()]
    return [Excerpt.of_text(tokens) for row in rows for tokens in row.split(CONTEXT)]


def demo_excerpts(examples: Iterable[Example]) -> Iterator[Excerpt]:
    """Yield each question with its right answer, scored at the answer's tokens and its end."""
    builder, config = PromptBuilder(MODEL_DIR), load_config(MODEL_DIR)
    settings = load_preprocessor_config(MODEL_DIR), load_video_config(MODEL_DIR)
    preprocess = resolve(family_of(config).preprocessor or "")(config, *settings)
    for example in examples:
        prompt = builder.build([{"role": "user", "content": [_part(example, part) for part in example.parts]}])
        tokens = prompt.tokens + builder.tokenizer.encode(example.answer)
        placements, plans = [item.placement for item in prompt.items], [item.plan for item in prompt.items]
        media = [token for place in placements for span in place.spans for token in range(span.start, span.end)]
        yield Excerpt(
            tokens=torch.tensor(tokens),
            positions=torch.from_numpy(builder.planner.positions(len(tokens), placements, plans).prompt),
            scored=torch.arange(len(prompt.tokens) - 1, len(tokens)),
            media=[part for item in prompt.items for part in preprocess(item.data, item.plan)],
            media_index=torch.tensor(media, dtype=torch.int64),
        )


def _part(example: Example, part: str | int) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    data = io.BytesIO()
    example.pictures[part].save(data, "PNG")
    return {"type": "image", "data": data.getvalue()}


def compare(models: Mapping[str, Score], excerpts: Iterable[Excerpt]) -> dict[str, dict[str, float]]:
    """Return each model's ``Divergence.summary`` from ``REFERENCE``, which is one of them."""
    found = {name: Divergence() for name in models}
    for excerpt in excerpts:
        reference = models[REFERENCE](excerpt)
        for name, divergence in found.items():
            divergence.add(reference if name == REFERENCE else models[name](excerpt), reference)
    return {name: divergence.summary() for name, divergence in found.items()}


def perplexity(model: Score, excerpts: Sequence[Excerpt]) -> float:
    """Return the perplexity of excerpts that are scored after every token."""
    losses = [-model(one)[:-1].gather(1, one.tokens[1:, None]) for one in excerpts]
    return float(torch.cat(losses).mean().exp())


def llama_cpp_models(folder: Path, gguf: Path, files: Path) -> tuple[dict[str, Score], dict[str, float]]:
    """Write ``gguf`` to ``files`` in each of ``GGUF_FORMATS``, and return the models and their layers' bits per weight.
    Raises RuntimeError if llama.cpp can't."""
    binding, threads = _binding(folder), torch.get_num_threads()
    models: dict[str, Score] = {}
    bits: dict[str, float] = {}
    for name in GGUF_FORMATS:
        source, target = gguf if name == "F16" else files / "F16.gguf", files / f"{name}.gguf"
        settings = binding.llama_model_quantize_default_params()
        settings.ftype = getattr(binding, f"LLAMA_FTYPE_MOSTLY_{name}")
        settings.allow_requantize, settings.nthread = True, threads
        if binding.llama_model_quantize(str(source).encode(), str(target).encode(), settings):
            raise RuntimeError(f"llama.cpp can't write {source} as {name}")
        models[f"llama.cpp {name}"] = _llama_cpp_model(binding, target)
        bits[f"llama.cpp {name}"] = bits_per_weight(read_gguf(target))
    return models, bits


def bits_per_weight(file: GgufFile) -> float:
    """Return those of a file's linear layers: what llama.cpp names a file after is its most frequent type's name."""
    layers = [one for one in file.tensors.values() if one.name.startswith("blk.") and len(one.shape) > 1]
    return round(8 * sum(one.num_bytes for one in layers) / sum(math.prod(one.shape) for one in layers), 2)


def _llama_cpp_model(binding: Any, file: Path) -> Score:
    threads = torch.get_num_threads()
    same = {"n_ctx": CONTEXT, "n_batch": CONTEXT, "n_threads": threads, "n_threads_batch": threads}
    return _llama_cpp_score(binding.Llama(str(file), logits_all=True, verbose=False, **same))


def _binding(folder: Path) -> Any:
    """Import llama-cpp-python from its sources, with the libraries that are built."""
    [sources] = folder.glob("llama_cpp_python-*/")
    os.environ["LLAMA_CPP_LIB_PATH"] = str((folder / "bin").resolve())
    sys.path.append(str(sources))
    sys.modules["diskcache"] = ModuleType("diskcache")  # of a cache of prompts that isn't used
    binding, native = importlib.import_module("llama_cpp"), importlib.import_module("llama_cpp.llama_cpp")
    default = native.llama_model_default_params

    def plain() -> Any:
        settings = default()
        settings.use_extra_bufts = False  # repacked for AMX, release 0.3.36 crashes with Q8_0
        return settings

    native.llama_model_default_params = plain  # type: ignore[attr-defined]
    return binding


def _llama_cpp_score(model: Any) -> Score:
    def score(excerpt: Excerpt) -> Tensor:
        model.reset()
        model.eval(excerpt.tokens.tolist())
        return torch.from_numpy(np.array(model.scores[: len(excerpt.tokens)], np.float32)).log_softmax(dim=1)

    return score


Formats = Mapping[str, Mapping[str, str]]
"""The settings of formats by their names; ``REFERENCE`` is one."""


def text_results(model: Path, wanted: Formats, gguf: Path | None, llama_cpp: Path | None) -> dict[str, Any]:
    """Compare formats on text. A text model has no towers, so formats of towers are left out. ``model`` is a folder or
    a GGUF file."""
    folder = gguf_folder(model) if model.is_file() else model
    excerpts = text_excerpts(folder)
    ours = {name: settings for name, settings in wanted.items() if "encoder_quantization" not in settings}
    models: dict[str, Score] = {name: Scorer(folder, settings).log_probabilities for name, settings in ours.items()}
    bits: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as files:
        if gguf and llama_cpp:
            theirs, bits = llama_cpp_models(llama_cpp, gguf, Path(files))
            models |= theirs
        elif model.is_file() and llama_cpp:
            models["llama.cpp, as stored"] = _llama_cpp_model(_binding(llama_cpp), model)
        formats = compare(models, excerpts)
    digest = hashlib.sha256(b"".join(one.tokens.numpy().tobytes() for one in excerpts)).hexdigest()
    return {
        "model": model.name,
        "passages": list(passages()),
        "tokens": sum(len(one.tokens) for one in excerpts),
        "tokens_sha256": digest,
        "perplexity": round(perplexity(models[REFERENCE], excerpts), 3),
        "formats": formats,
        "bits_per_weight": bits,
    }


def demo_results(wanted: Formats, questions: int, asked: int) -> dict[str, Any]:
    """Compare formats on the demo model; ``asked`` of the questions are answered over HTTP as well."""
    examples = [make_example(seed) for seed in EVALUATION_SEEDS[:questions]]
    models = {name: Scorer(MODEL_DIR, settings).log_probabilities for name, settings in wanted.items()}
    formats = compare(models, demo_excerpts(examples))
    examples = examples[:asked]
    answers: dict[str, list[str]] = {}
    for name, settings in wanted.items() if examples else ():
        given: dict[str, Any] = dict(settings)
        answers[name] = asyncio.run(answers_over_http(MODEL_DIR, examples, "1E1PD", EngineConfig(**given)))
    for name, said in answers.items():
        right = sum(answer == example.answer for answer, example in zip(said, examples, strict=True))
        changed = sum(answer != other for answer, other in zip(said, answers[REFERENCE], strict=True))
        formats[name] |= {"right": round(right / len(examples), 4), "changed": changed}
    return {"questions": questions, "asked": asked, "formats": formats}


def markdown(found: Mapping[str, Any]) -> str:
    """Return the results as a table."""
    text, demo = (found.get(part, {}).get("formats", {}) for part in ("text", "demo"))
    columns = [f"{part}: {label}" for part in ("text", "demo") for label in COLUMNS.values()]
    lines = [
        "| format | " + " | ".join([*columns, "demo: right answers", "demo: other answers than float32"]) + " |",
        "| --- |" + " --- |" * (len(columns) + 2),
    ]
    for name in dict.fromkeys((*text, *demo)):
        cells = [_cell(part.get(name, {}), column) for part in (text, demo) for column in COLUMNS]
        cells += [_cell(demo.get(name, {}), column) for column in ("right", "changed")]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(figures: Mapping[str, float], column: str) -> str:
    if column not in figures:
        return ""
    return f"{100 * figures[column]:.1f} %" if column in {"top_1", "right"} else f"{figures[column]:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "model",
        type=Path,
        nargs="?",
        help="a text model's checkpoint folder, or a GGUF file; without it, the demo model alone",
    )
    parser.add_argument("--formats", nargs="+", choices=ALL_FORMATS, default=list(ALL_FORMATS)[:-1], metavar="NAME")
    parser.add_argument("--gguf", type=Path, help="the file that the folder was made from")
    parser.add_argument("--llama-cpp", type=Path, metavar="DIR")
    parser.add_argument("--questions", type=int, default=500, help="for the demo model; 0 leaves it out")
    parser.add_argument("--asked", type=int, default=500, help="how many of them are asked over HTTP, in each format")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where to write the result as JSON as well")
    parser.add_argument("--markdown", type=Path, help="where to write the table")
    options = parser.parse_args()
    like_an_instance(options.threads)
    wanted = {name: ALL_FORMATS[name] for name in (REFERENCE, *options.formats)}
    found: dict[str, Any] = {"machine": machine()}
    if options.model:
        found["text"] = text_results(options.model, wanted, options.gguf, options.llama_cpp)
    if options.questions:
        found["demo"] = demo_results(wanted, options.questions, options.asked)
    report(found, options.out)
    if options.markdown:
        options.markdown.write_text(markdown(found))


if __name__ == "__main__":
    main()
