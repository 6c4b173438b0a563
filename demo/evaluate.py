"""Evaluates a checkpoint on questions it was not trained on, with transformers only: `python -m demo.evaluate`."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, Qwen3VLForConditionalGeneration

from demo.questions import EVALUATION_SEEDS, Components, make_example
from triptych.demo import MODEL_DIR, PICTURES_DIR

LONGEST_ANSWER = 48


class Reference:
    """The checkpoint in transformers: greedy decoding, float32."""

    def __init__(self, folder: Path) -> None:
        self._model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._processor = AutoImageProcessor.from_pretrained(folder)
        self._image = self._model.config.image_token_id

    @torch.no_grad()
    def answer(self, pictures: Sequence[Image.Image], parts: Components) -> str:
        """Return the answer to one message of texts and pictures (given by their indices)."""
        content: list[dict[str, str]] = [
            {"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts
        ]
        messages: list[Any] = [{"role": "user", "content": content}]
        prompt = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = self._tokenizer(prompt, add_special_tokens=False).input_ids
        inputs: dict[str, Any] = {}
        if pictures:
            ordered = [pictures[part] for part in parts if isinstance(part, int)]
            inputs = dict(self._processor(ordered, return_tensors="pt"))
            sizes = iter((inputs["image_grid_thw"].prod(-1) // 4).tolist())
            ids = [token for one in ids for token in [one] * (next(sizes) if one == self._image else 1)]
        tokens = torch.tensor([ids])
        kinds = (tokens == self._image).int()
        written = self._model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            mm_token_type_ids=kinds,
            max_new_tokens=LONGEST_ANSWER,
            do_sample=False,
            **inputs,
        )
        return str(self._tokenizer.decode(written[0, tokens.shape[1] :], skip_special_tokens=True))


def main() -> None:
    """Parse the arguments, evaluate, and print the accuracy for each kind of question."""
    parser = argparse.ArgumentParser(description="Measure the demo model on questions it was not trained on.")
    parser.add_argument("--model", type=Path, default=MODEL_DIR, help="the checkpoint's folder (%(default)s)")
    parser.add_argument("--questions", type=int, default=500, help="how many (%(default)s)")
    parser.add_argument("--first", type=int, default=0, help="skip this many evaluation seeds (%(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="processor cores to use (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    reference = Reference(options.model)
    asked: Counter[str] = Counter()
    right: Counter[str] = Counter()
    for seed in EVALUATION_SEEDS[options.first : options.first + options.questions]:
        example = make_example(seed)
        answer = reference.answer(example.pictures, example.parts)
        asked[example.kind] += 1
        right[example.kind] += answer == example.answer
        if answer != example.answer:
            print(f"seed {seed} ({example.kind}): {example.parts} -> {answer!r}, not {example.answer!r}", flush=True)
    for kind in sorted(asked):
        print(f"{kind:16} {right[kind]:4} of {asked[kind]:4}")
    print(f"{'all':16} {right.total():4} of {asked.total():4}: {right.total() / asked.total():.1%}")
    ask_bundled(reference)


def ask_bundled(reference: Reference) -> None:
    """Ask the demo's questions about the bundled pictures."""
    for entry in json.loads((PICTURES_DIR / "questions.json").read_text()):
        pictures = [Image.open(PICTURES_DIR / name) for name in entry["pictures"]]
        answer = reference.answer(pictures, (*range(len(pictures)), entry["question"]))
        verdict = "right" if answer == entry["answer"] else f"WRONG, should be {entry['answer']!r}"
        print(f"{' + '.join(entry['pictures'])}: {entry['question']} -> {answer} ({verdict})")


if __name__ == "__main__":
    main()
