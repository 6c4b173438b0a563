"""The table of fields that requests may have beyond those that the models serve, by place.

A field that can't change the answer is a hint, and is ignored. A field that can is another name of a served one, or is
refused unless its value demands nothing. ``docs/api-fields.md`` has this table, too.
"""

from collections.abc import Iterable

from triptych.api.field_rules import Alias, Hint, Meaning, Members, Off, Rule, Rules

THINKING = "chat_template_kwargs.enable_thinking"
PARTS, CONTINUE = "parts of content", "continue_final_message"


def _hints(names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), Hint())


def _off(names: str, *accepted: object, use: str = "") -> dict[str, Rule]:
    return dict.fromkeys(names.split(), Off(accepted, use))


def _aliases(target: str, names: str, unset: Iterable[object] = ()) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), Alias(target, tuple(unset)))


REQUEST = Rules(
    {
        # who asks, what for, and what is stored or cached
        **_hints("user safety_identifier session_id metadata client_metadata litellm_metadata litellm_session_id"),
        **_hints("litellm_trace_id request_id rid trace trace_id tags labels conversation_id thread_id user_id"),
        **_hints("service_tier store prediction prompt_cache_key prompt_cache_retention prompt_cache_options"),
        **_hints("cache caching cache_control cache_prompt id_slot slot_id keep_alive usage timings_per_token"),
        **_hints("context_management"),
        **_hints("return_progress guided_decoding_backend truncation_side ttl sse_ping_interval project organization"),
        # more about the answer's making than answers here have
        **_hints("return_tokens verbose response_fields return_meta_info return_cached_tokens_details log_metrics"),
        **_hints("return_perf_metrics perf_metrics_in_response"),
        # gateways' choice among services, made before this one
        **_hints("provider models route fallbacks debug require_parameters api_base custom_llm_provider drop_params"),
        **_hints("extra_headers max_retries num_retries compliance citation_options disable_tool_validation"),
        # where an engine computes, and how it speculates, which leaves answers as they are
        **_hints("bootstrap_host bootstrap_port bootstrap_room data_parallel_rank routed_dp_rank disaggregated_params"),
        **_hints("draft_model speculative prompt_lookup_num_tokens backend_sampling lazy_grammar truncation_length"),
        # another engine's memory, and settings of samplers that are off
        **_hints("num_ctx num_batch num_thread num_gpu main_gpu low_vram use_mmap use_mlock numa f16_kv"),
        **_hints("mirostat_tau mirostat_eta xtc_threshold dynatemp_exponent smoothing_curve"),
        **_hints("dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers"),
        # other names
        **_aliases("repetition_penalty", "repeat_penalty"),
        **_aliases("seed", "random_seed"),
        **_aliases("stop", "stop_sequences stop_words"),
        **_aliases("cache_salt", "extra_key"),
        **_aliases("ignore_eos", "ignore_eos_token"),
        **_aliases("structured_outputs.json", "guided_json json_schema"),
        **_aliases("structured_outputs.regex", "guided_regex regex"),
        **_aliases("structured_outputs.grammar", "guided_grammar grammar ebnf", unset=[""]),
        **_aliases("structured_outputs.choice", "guided_choice"),
        **_aliases("structured_outputs.json_object", "guided_json_object", unset=[False]),
        "do_sample": Meaning({True: {}, False: {"temperature": 0.0}}),
        # features that are off
        **_off("use_beam_search early_stopping"),
        **_off("num_beams length_penalty", 1),
        **_off("guided_whitespace_pattern whitespace_pattern structural_tag", use="structured_outputs"),
        **_off("typical_p tfs_z guidance_scale n_best", 1),
        **_off("top_n_sigma", 0, -1),
        **_off("top_a mirostat xtc_probability dynatemp_range smoothing_factor epsilon_cutoff eta_cutoff", 0),
        **_off("dry_multiplier no_repeat_ngram_size penalty_alpha min_keep n_indent n_keep num_keep", 0),
        **_off("encoder_repetition_penalty", 1, use="repetition_penalty"),
        **_off("repeat_last_n", -1),
        **_off(
            "samplers logits_processors custom_logit_processor custom_params vllm_xargs allowed_token_ids bad_words"
            " logprob_token_ids"
        ),
        **_off("n_probs top_n_tokens", 0, use="logprobs"),
        **_off("details decoder_input_details post_sampling_probs", use="logprobs"),
        **_off("return_full_text", use="echo of completions"),
        **_off("t_max_predict_ms", 0, -1, use="timeout"),
        **_off("truncate truncate_prompt_tokens truncation input_ids input_embeds prompt_embeds"),
        **_off("include_stop_str_in_output stop_regex no_stop_trim watermark return_hidden_states"),
        **_off("detokenize spaces_between_special_tokens incremental_output parse_tool_calls", True),
        **_off("context_length_exceeded_behavior", "error"),
        **_off("result_format", "message"),
        **_off("lora_id template_id assistant_id preset_id prompt_id previous_response_id safety_model extra_body"),
        **_off("lora lora_path lora_request lora_adapter adapter_id kv_transfer_params"),
        **_off("audio moderation safe_prompt safety_settings guardrails plugins transforms"),
        **_off("web_search_options web_search search_parameters", use="tools"),
    }
)
COMPLETION = REQUEST | Rules(
    {
        **_aliases("max_tokens", "max_new_tokens n_predict num_predict", unset=[-1]),
        **_off("suffix"),
    }
)
CHAT = REQUEST | Rules(
    {
        **_aliases("max_tokens", "max_new_tokens n_predict num_predict", unset=[-1]),
        **_aliases(THINKING, "enable_thinking think"),
        **_aliases("chat_template_kwargs.clear_thinking", "clear_thinking"),
        **_aliases("thinking_token_budget", "thinking_budget reasoning_budget", unset=[-1]),
        "reasoning_format": Meaning(
            {
                **{name: {} for name in ("auto", "parsed", "deepseek")},
                **{name: {"separate_reasoning": False} for name in ("none", "raw")},
                "hidden": {"include_reasoning": False},
            }
        ),
        "reasoning": Members(
            {
                "effort": Alias("reasoning_effort"),
                "max_tokens": Alias("thinking_token_budget"),
                "enabled": Alias(THINKING),
                "exclude": Meaning({False: {}, True: {"include_reasoning": False}}),
                **_hints("summary generate_summary"),
            }
        ),
        "thinking": Members(
            {
                "type": Meaning(
                    {
                        "enabled": {THINKING: True},
                        "disabled": {THINKING: False},
                        **{name: {} for name in ("auto", "adaptive")},
                    }
                ),
                "budget_tokens": Alias("thinking_token_budget"),
                **_hints("display"),
            }
        ),
        **_off("stream_reasoning reasoning_split stream_tool_calls tool_stream", True),
        **_off("verbosity", "medium"),
        **_off("modalities", ["text"]),
        **_off("echo", use=CONTINUE),
        **_off("functions", use="tools"),
        **_off("function_call", "none", "auto", use="tool_choice"),
        **_off("add_special_tokens chat_template documents tool_prompt"),
        **_hints("chat_template_content_format"),
    }
)
MESSAGE = Rules(
    {
        # an earlier answer's
        **_hints("id status phase object created created_at timestamp metadata annotations citations cache_control"),
        **_hints("finish_reason model usage reasoning_details reasoning_opaque thinking_blocks thought_signature"),
        **_hints("extra_content provider_specific_fields weight"),
        **_aliases("reasoning_content", "thinking reasoning_text"),
        **_off("images image_urls videos audios audio files attachments experimental_attachments documents", use=PARTS),
        **_off("prefix partial", use=CONTINUE),
    },
    ignores_unknown=True,
)
PART = Rules(
    {
        **_hints(
            "id cache_control prompt_cache_breakpoint annotations citations logprobs metadata filename name title"
        ),
        **_hints("extra_content provider_specific_fields thought_signature"),
        **_off("modalities", "image", "multi-images"),
    }
)
TEXT_PART = PART | Rules(_hints("role status phase parsed"))
"""Agents spread what they noted of an answer over its texts when they send it back."""
THINKING_PART = TEXT_PART | Rules(_hints("signature closed summary encrypted_content"))
IMAGE_PART = PART | Rules(_aliases("image_url.detail", "detail"))
MEDIA = Rules(_hints("format mime_type media_type id filename name cache_control"))
"""The object in a part that says where its media are."""
CALL = Rules({}, ignores_unknown=True)
"""A call of an earlier answer, and its function."""
FUNCTION = Rules(
    {
        **_hints(
            "id title type cache_control metadata annotations display_name input_examples examples response returns"
        ),
        **_hints("output_schema return defer_loading eager_input_streaming allowed_callers"),
    }
)
TOOL = FUNCTION | Rules(_aliases("function.strict", "strict"))
NAMED = FUNCTION | Rules(_hints("description parameters strict format"))
JSON_FORMAT = Rules(_aliases("schema", "value"))
SCHEMA_FORMAT = Rules(
    {
        **_aliases("json_schema.schema", "schema value"),
        **{name: Alias(f"json_schema.{name}") for name in ("name", "strict", "description")},
    }
)
STREAM_OPTIONS = Rules(_off("include_obfuscation"))
ANTHROPIC_REQUEST = Rules(
    {
        **{name: rule for name, rule in REQUEST.by_name.items() if isinstance(rule, Hint | Off)},
        **_hints("metadata service_tier cache_control inference_geo speed betas anthropic_beta"),
        **_off("container mcp_servers", use="tools"),
    }
)
ANTHROPIC_BLOCK = Rules(_hints("cache_control citations signature caller id"))
ANTHROPIC_TOOL = Rules(
    {
        **_hints("cache_control defer_loading eager_input_streaming input_examples allowed_callers"),
    },
    ignores_unknown=True,
)


def _beside_all(rules: Rules) -> Rules:
    return Rules({name: rule for name, rule in rules.by_name.items() if REQUEST.by_name.get(name) != rule})


TABLE = {
    "every generating request": REQUEST,
    "completions": _beside_all(COMPLETION),
    "chats": _beside_all(CHAT),
    "messages": MESSAGE,
    "content parts": PART,
    "parts that are texts": TEXT_PART,
    "parts of reasoning": Rules(_hints("signature closed summary encrypted_content")),
    "`image_url` parts": Rules(_aliases("image_url.detail", "detail")),
    "`image_url`, `video_url`, …": MEDIA,
    "earlier tool calls": CALL,
    "tools, and their members `function` and `custom`": FUNCTION,
    "tools": Rules(_aliases("function.strict", "strict")),
    "tools that `tool_choice` names": Rules(_hints("description parameters strict format")),
    "`response_format` of type `json_object`": JSON_FORMAT,
    "`response_format` of type `json_schema`": SCHEMA_FORMAT,
    "`stream_options`": STREAM_OPTIONS,
    "`/v1/messages`": _beside_all(ANTHROPIC_REQUEST),
    "`/v1/messages`: content blocks": ANTHROPIC_BLOCK,
    "`/v1/messages`: tools": ANTHROPIC_TOOL,
}
"""Each place's own rules, for the documentation."""
