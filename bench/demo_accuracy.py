"""Accuracy of the demo model on images from seeds outside its training set, over HTTP. Compares each answer with the
correct one and with that of transformers' ``generate`` on the same checkpoint.

    python -m bench.demo_accuracy --questions 500 --topology 1E1PD
"""

import argparse
import asyncio
import json
from pathlib import Path

from demo.accuracy import EvaluatedAnswer, answers_over_http, reference_answers, report
from demo.questions import EVALUATION_SEEDS, make_example
from triptych.config import EngineConfig
from triptych.demo import MODEL_DIR


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--topology", default="1E1PD")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--encoder-quantization", default="none")
    options = parser.parse_args()
    examples = [make_example(seed) for seed in EVALUATION_SEEDS[: options.questions]]
    engine = EngineConfig(
        dtype=options.dtype,
        quantization=options.quantization,
        encoder_quantization=options.encoder_quantization,
    )
    answers = asyncio.run(answers_over_http(options.model, examples, options.topology, engine))
    references = reference_answers(options.model, examples)
    asked = [EvaluatedAnswer(*item) for item in zip(examples, answers, references, strict=True)]
    print(json.dumps(report(asked), indent=2))


if __name__ == "__main__":
    main()
