# needs: own torch
# needs: pip lmms-eval>=0.7.3,<0.8 torchvision<0.29 filelock<3.20
# needs: without torchvision
# A newer torchvision would bring another PyTorch; this one's operators need CUDA. Newer filelocks lack what it reads.
"""LMMs-Lab's evaluation harness on a task made here: questions with and without a picture."""

import json
from typing import Any

from checks import FOLDER, IMAGE, MODEL, URL, command, lacks, run

TASK = """\
task: asked
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
generation_kwargs: {{max_new_tokens: 20}}
doc_to_visual: !function asked.pictures
doc_to_text: question
doc_to_target: "{answer}"
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
MODULE = """\
from PIL import Image
def pictures(question):
    return [Image.open(path).convert("RGB") for path in question["pictures"]]
"""


def evaluate(name: str, answer: str, question: str, *pictures: str) -> None:
    """Run a task of four questions. Raises AssertionError unless all answers are this one."""
    folder = FOLDER / name
    folder.mkdir()
    data = folder / "questions.jsonl"
    asked = ({"question": f"{question} {number}", "pictures": list(pictures)} for number in range(4))
    data.write_text("".join(json.dumps(one) + "\n" for one in asked))
    (folder / "asked.py").write_text(MODULE)
    (folder / "asked.yaml").write_text(TASK.format(data=data, answer=answer))
    settings = f"model={MODEL},base_url={URL}/v1,num_concurrent=2,max_retries=1,timeout=120"
    shown = command(
        *("lmms-eval", "--model", "openai", "--model_args", settings, "--tasks", "asked", "--batch_size", 1),
        *("--include_path", folder, "--output_path", folder / "results"),
    )
    found = list((folder / "results").rglob("*_results.json"))
    assert found, shown[-280:]  # its errors are no exit code
    results: dict[str, Any] = json.loads(found[0].read_text())["results"]["asked"]
    assert results["exact_match,none"] == 1, results


checks = {
    "text": lambda: evaluate("text", "Hello from Triptych.", "Hi"),
    "image": lambda: evaluate("image", "I see a picture.", "What is it?", str(IMAGE)),
    "stream": lacks("it doesn't stream"),
    "turns": lacks("not asked of it"),
    "tool": lacks("not asked of it"),
}
run(checks | {"context": lacks("it counts errors of all kinds together")})
