"""Asks the demo model about pictures from seeds it was never trained on, over HTTP, and compares every answer with the
right one and with what transformers' ``generate`` says on the same checkpoint.

    python -m bench.demo_accuracy --questions 500 --topology 1E1PD
"""

import argparse
import asyncio
import json
from pathlib import Path

from demo.accuracy import EvaluatedAnswer, answers_over_http, reference_answers, report
from demo.questions import EVALUATION_SEEDS, make_example
from triptych.demo import MODEL_DIR


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--topology", default="1E1PD")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    examples = [make_example(seed) for seed in EVALUATION_SEEDS[: options.questions]]
    answers = asyncio.run(answers_over_http(options.model, examples, options.topology, options.dtype))
    references = reference_answers(options.model, examples)
    asked = [EvaluatedAnswer(*item) for item in zip(examples, answers, references, strict=True)]
    print(json.dumps(report(asked), indent=2))


if __name__ == "__main__":
    main()
