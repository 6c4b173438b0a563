"""Why tests don't pass. Each rule is a pattern for a test's id and its failures; the first one that matches counts."""

import re

EXTENSION = "extension"
"""docs/api-fields.md names it among those that aren't served."""
MODEL = "needs another model"
"""A template, a tokenizer or knowledge that the scripted model lacks."""
MISSING = "needs what isn't installed"
LEFT = "differs"

EXTENSIONS = {
    "LoRA adapters": r"zephyr-lora|test_check_models",
    "`use_beam_search`": r"use_beam_search",
    "`allowed_token_ids`": r"allowed_token_ids",
    "`logprob_token_ids`": r"logprob_token_ids",
    "log probabilities of chosen or of all tokens": r"test_chat_echo\.py::test_(prompt|top)_logprobs",
    "`truncate_prompt_tokens`": r"truncate_prompt_tokens",
    "`prompt_embeds`": r"with_prompt_embeds",
    "`kv_transfer_params`": r"kv_transfer_params",
    "echo in chats": r"400 - echo: is not supported",
    "any other `role`": r"test_custom_role",
    "`source_lang_code`": r"test_translategemma",
    "`enable_response_messages`": r"enable_response_messages|previous_input_messages",
    "tools that the service runs itself": r"test_code_interpreter|test_mcp_tool",
    "`background: true`": r"400 - background|test_background",
    "`/v1/chat/completions/batch`": r"test_batched_chat_completions",
    "`/v1/decisions`": r"decisions",
    "`/invocations`": r"/invocations",
    "`--enable-force-include-usage`": r"force_include_usage",
    "`--enable-per-request-metrics`": r"per_request_metrics",
    "`--return-tokens-as-token-ids`": r"test_(completion|chat)_return_tokens_as_token_ids_completion\[True",
    "`--root-path`": r"root_path",
    "`--skip-tokenizer-init`": r"test_token_in_token_out",
    "`--watermark-config`": r"watermark",
    # SGLang's
    "`matched_stop`": r"matched_stop'|TestMatchedStop::test_finish_length",
    "`stop_regex`": r"stop_regex",
    "`custom_logit_processor`": r"CustomLogitProcessor",
    "`/v1/rerank`": r"Rerank",
    "`/v1/score`": r"OpenAIV1Score",
    "`/v1/audio/transcriptions`": r"Transcription",
    "`return_hidden_states`": r"HiddenStates",
    "`/generate`": r"TestCacheReport::test_generate|generate_exact_count",
    "any name as `model`": r"404 - model '.*' is not served here",
    "`reasoning_content: null`": r"object has no attribute 'reasoning_content'",
    "`stream_reasoning`": r"stream_reasoning",
    "`usage.reasoning_tokens`": r"KeyError: 'reasoning_tokens'",
    "chats' names of usage in responses": r"attribute 'prompt_tokens'|'prompt_tokens' not found",
}
"""By a text of docs/api-fields.md."""
OTHERS = (
    (MISSING, "a GPU, to write a checkpoint with", r"test_tensorizer"),
    (MISSING, "the package `lm_eval`, and a real model's answers", r"test_lmeval"),
    (MISSING, "Schemathesis for pytest 9", r"test_openapi_stateless"),
    (MISSING, "the peer's own modules, within a test of a service", r"test_system_message_with_tools|_image_content_"),
    (MISSING, "the log of the peer's service", r"TestLargeMaxNewTokens"),
    (MODEL, "a model that calls in Python's form", r"TestOpenAIPythonic"),
    (MODEL, "Mistral's template and call ids", r"test_mistral_tool_calls"),
    (
        MODEL,
        "another tokenizer's number of tokens",
        r"test_single_chat_session\[Hugging|test_completion\.py::test_single_completion",
    ),
    (MODEL, "a model that writes the tokens that its tokenizer makes", r"return_tokens_as_token_ids_completion\[False"),
    (MODEL, "a tokenizer with one token that ends reasoning", r"no single token ends this model's reasoning"),
    (MODEL, "Qwen's template", r"test_chat_completion_with_tool_use"),
    (MODEL, "a model that continues a prompt as it is", r"test_more_than_one_prompt_logprobs"),
    (LEFT, "a tool result's `id`, which is `tool_use_id` in Anthropic's API", r"tool_use_id: Field required"),
    (LEFT, "schemas of the same name are refused", r"test_conflicting_defs"),
    (
        LEFT,
        "the peer's words of an error",
        r"invalid 'parameters' schema|greater_than_equal|"
        r"Either prompt or prompt_embeds|multiple_non_integer_keys",
    ),
)


def reason(test: str, message: str) -> tuple[str, str]:
    """The kind and the reason of a failure; without a rule, ``LEFT`` and no reason."""
    said = f"{test} {message}"
    for name, pattern in EXTENSIONS.items():
        if re.search(pattern, said):
            return EXTENSION, name
    for kind, why, pattern in OTHERS:
        if re.search(pattern, said):
            return kind, why
    return LEFT, ""
