# needs: own transformers
# needs: pip lm-eval[api]>=0.4.13,<0.5
"""EleutherAI's evaluation harness on tasks made here: answers by chat and completions, likelihoods of given answers."""

import json
import subprocess
from typing import Any

from checks import CHECKPOINT, FOLDER, MODEL, URL, lacks, run

TASK = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
fewshot_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{answer}"
"""
WRITTEN = "output_type: generate_until\ngeneration_kwargs: {until: [END], max_gen_toks: 20}\n"
WRITTEN += "metric_list: [{metric: exact_match}]\n"
CHOSEN = "output_type: multiple_choice\ndoc_to_choice: [Good morning, Good evening]\nmetric_list: [{metric: acc}]\n"


def evaluate(kind: str, path: str, answer: str, form: str, *more: str, tokenizer: str = "None") -> float:
    """Run a task of four questions; return its metric, 0 to 1. Raises AssertionError with the end of its output."""
    folder = FOLDER / f"{kind}-{len(list(FOLDER.iterdir()))}"
    folder.mkdir()
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps({"question": f"Hi {number}"}) + "\n" for number in range(4)))
    (folder / "task.yaml").write_text(TASK.format(name="asked", data=data, answer=answer) + form)
    settings = f"model={MODEL},base_url={URL}/v1/{path},tokenizer_backend={tokenizer},num_concurrent=2,max_retries=1"
    command = ["lm-eval", "run", "--model", kind, "--model_args", settings, "--tasks", "asked"]
    command += ["--include_path", str(folder), "--output_path", str(folder / "results"), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-250:]
    (found,) = (folder / "results").rglob("results_*.json")
    results: dict[str, Any] = json.loads(found.read_text())["results"]["asked"]
    (metric,) = (value for name, value in results.items() if name.startswith(("exact_match,", "acc,")))
    return float(metric)


def text() -> None:
    chat = evaluate(
        "local-chat-completions", "chat/completions", "Hello from Triptych.", WRITTEN, "--apply_chat_template"
    )
    assert chat == 1, f"chat: {chat}"
    plain = evaluate("local-completions", "completions", "Hello from Triptych.", WRITTEN)
    assert plain == 1, f"completions: {plain}"
    # each answer is as unlikely as the other, so any share is right
    evaluate(
        "local-completions", "completions", "Good morning", CHOSEN, tokenizer=f"huggingface,tokenizer={CHECKPOINT}"
    )


def turns() -> None:
    asked = ["--apply_chat_template", "--num_fewshot", "1", "--fewshot_as_multiturn"]
    again = evaluate("local-chat-completions", "chat/completions", "Hello again.", WRITTEN, *asked)
    assert again == 1, again


no_context = lacks("it cuts prompts to its own max_length")
checks = {"text": text, "image": lacks("its models of this API have none"), "stream": lacks("it doesn't stream")}
run(checks | {"turns": turns, "tool": lacks("it has no tools"), "context": no_context})
