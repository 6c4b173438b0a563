"""Answers requests of ``bench/peers.py`` in transformers. Says a line once the model is ready, and then for each line
with a request's seed one with its figures, as JSON.

HTTP, template and tokenizer aren't counted, which favours transformers.
"""

import argparse
import base64
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from bench.serve import Load, request_body
from triptych.checkpoint.config_files import load_config, load_preprocessor_config, load_video_config
from triptych.models.registry import family_of, resolve
from triptych.prompt.prompt import PromptBuilder


def inputs(folder: Path, builder: PromptBuilder, load: Load, seed: int) -> dict[str, torch.Tensor]:
    """One request as the model takes it: planned and preprocessed as Triptych would, which is what transformers' own
    image processor makes of it, too (tests/models)."""
    *pictures, text = request_body("m", load, seed)["messages"][0]["content"]
    data = [base64.b64decode(picture["image_url"]["url"].partition(",")[2]) for picture in pictures]
    content = [*({"type": "image", "data": one} for one in data), {"type": "text", "text": text["text"]}]
    prompt = builder.build([{"role": "user", "content": content}])
    tokens = torch.tensor([prompt.tokens])
    text_alone = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if not prompt.items:
        return text_alone
    config = load_config(folder)
    preprocessor = family_of(config).preprocessor
    assert preprocessor is not None
    preprocess = resolve(preprocessor)(config, load_preprocessor_config(folder), load_video_config(folder))
    made = [one for item in prompt.items for one in preprocess(item.data, item.plan)]
    image = builder.planner.placeholder_tokens["image"]
    assert isinstance(image, int)
    return text_alone | {
        "mm_token_type_ids": torch.eq(tokens, image).int(),
        "pixel_values": torch.cat([torch.from_numpy(one.patches) for one in made]),
        "image_grid_thw": torch.tensor([one.grid for one in made]),
    }


@torch.inference_mode()
def ask(model: PreTrainedModel, request: dict[str, torch.Tensor], tokens: int) -> tuple[float, float]:
    """Return the seconds to the first token, and per token after it."""
    times: list[float] = []

    class Clock:
        """What ``generate`` streams tokens to: the prompt first, then one by one."""

        def put(self, _: torch.Tensor) -> None:
            times.append(time.perf_counter())

        def end(self) -> None:
            """Nothing is kept."""

    began = time.perf_counter()
    generate: Any = model.generate
    on_device = {name: value.to(model.device) for name, value in request.items()}
    generate(**on_device, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, streamer=Clock())
    first, last = times[1], times[-1]
    return first - began, (last - first) / (tokens - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--load", type=json.loads, default={}, help="fields of bench.serve.Load, as JSON")
    options = parser.parse_args()
    load = Load(**options.load)
    torch.set_num_threads(options.threads)
    model_class: Any = getattr(transformers, load_config(options.model)["architectures"][0])
    model = model_class.from_pretrained(options.model, dtype=getattr(torch, options.dtype)).eval().to(options.device)
    model.generation_config.eos_token_id = None
    builder = PromptBuilder(options.model)
    print("{}", flush=True)
    for line in sys.stdin:
        request = inputs(options.model, builder, load, int(line))
        ttft, tpot = ask(model, request, load.output_tokens)
        tokens = request["input_ids"].shape[1]
        found = {"ttft_ms": round(1e3 * ttft, 1), "tpot_ms": round(1e3 * tpot, 2), "prompt_tokens": tokens}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
