"""What flags of other projects are here, for those that aren't another name of a setting."""

_PREPARED = "a tokenizer and a chat template are the checkpoint's own: put others into its folder"
_RANKS = "see --tensor-parallel-size, or a --topology of several instances"
_LORA = "only the adapters within Phi-4-multimodal are served: merge yours into the weights"
_SPECULATION = "there is no speculative decoding: leave it out"
_IN_REQUESTS = "requests have it as a field: give it there"
_ALWAYS = "this is always so: leave it out"
_OFFLOADING = "a model is on one device as a whole: choose it with --device"
_POOLING = "models generate text: there are no embeddings of texts, scores or classes"
_LOGS = "use --log-level, or --enable-log-requests for a line of each request"

_TABLE = {
    # the model and its files
    "model model_path m model_id": "give the model first: triptych serve MODEL",
    "hf hf_repo hfr hf_file hff model_url mu": "give the model's name first: triptych serve ORG/NAME",
    "mmproj_url no_mmproj mm": "encoders are in the checkpoint's folder or, of a GGUF file, in that of --mmproj: leave "
    "it out for none",
    "tokenizer tokenizer_path tokenizer_mode chat_template chat_template_file chat_template_content_format "
    "skip_tokenizer_init": _PREPARED,
    "revision tokenizer_revision code_revision": "it follows the model's name: ORG/NAME@REVISION",
    "download_dir": "set HF_HOME, whose folder hub has the downloaded models",
    "hf_token token hft": "set HF_TOKEN: other users can read command lines",
    "load_format model_loader_extra_config": "the format of the weights follows from their files: leave it out",
    "trust_remote_code": "no code of a checkpoint is ever run: leave it out",
    "generation_config override_generation_config sampling_defaults": "defaults are those of the checkpoint's "
    "generation_config.json, and requests override them",
    "hf_overrides json_model_override_args override_kv": "edit config.json in the checkpoint's folder",
    "skip_mm_profiling": "nothing is profiled at the start: leave it out",
    "keepalive": "a model stays loaded until the service ends: leave it out",
    # memory
    "gpu_memory_utilization mem_fraction_static": "use --kv-cache-memory, such as 25% or 8GiB; its share is one of the "
    "memory that is free once the weights are loaded",
    "swap_space": "nothing is swapped; preempted requests are recomputed: leave it out",
    "cpu_offload_gb n_gpu_layers gpu_layers ngl split_mode tensor_split ts main_gpu mg mlock no_mmap mmap n_cpu_moe": (
        _OFFLOADING
    ),
    "kv_offloading_size hicache_ratio hicache_size enable_hierarchical_cache kv_unified": "the KV cache is in one "
    "memory: use --kv-cache-memory",
    "cache_type_k ctk cache_type_v ctv": "use --kv-cache-dtype, such as int8",
    "ctx_size c": "use --max-model-len for one request, --kv-cache-tokens for all together",
    "mm_processor_cache_gb mm_processor_cache_type disable_mm_preprocessor_cache": "encode instances cache embeddings: "
    "use --encode-cache-mb",
    # speed
    "max_num_queued_reqs max_queued_requests": "use --max-queue, which counts running requests, too",
    "chunked_prefill_size batch_size b ubatch_size ub max_prefill_tokens max_num_partial_prefills": "use "
    "--max-num-batched-tokens: decodes first, then prefill chunks",
    "enable_chunked_prefill cont_batching cb enable_mixed_chunk async_scheduling jinja": _ALWAYS,
    "enable_auto_tool_choice": "tools are taken whenever a request has some: leave it out",
    "scheduling_policy schedule_policy schedule_conservativeness": "capacity is shared by work served per client, and "
    "requests have a priority: leave it out",
    "attention_backend flash_attn fa mm_encoder_attn_backend sampling_backend": "the kernels follow from the device: "
    "leave it out",
    "compilation_config optimization_level enable_torch_compile cuda_graph_max_bs cuda_graph_bs "
    "max_cudagraph_capture_size": "only --no-cuda-graphs changes how steps run",
    "speculative_config spec_model speculative_algorithm speculative_num_steps speculative_draft_model_path draft_max "
    "model_draft md": _SPECULATION,
    # several devices, several processes
    "data_parallel_size dp_size dp data_parallel_backend enable_dp_attention mm_encoder_tp_mode": "use a --topology "
    "such as 2EPD or 1E2PD",
    "pipeline_parallel_size pp_size pp enable_expert_parallel ep_size ep expert_parallel_size "
    "decode_context_parallel_size": f"not supported; {_RANKS}",
    "distributed_executor_backend nnodes node_rank dist_init_addr": "use --on ray, or --role and --join there",
    "mm_encoder_only encoder_only": "use --role E",
    "language_only language_model_only": "use --role PD",
    "encoder_urls": "encoders join the frontend: --role E --join HOST:PORT",
    "disaggregation_mode": "use --role P or --role D, or a --topology such as 1E1P1D",
    "kv_transfer_config ec_transfer_config encoder_transfer_backend disaggregation_transfer_backend": "use --fabric",
    # requests and answers
    "seed random_seed temp temperature top_k top_p min_p n_predict n repeat_penalty format think hidethinking": (
        _IN_REQUESTS
    ),
    "mm_processor_kwargs": "requests have mm_processor_kwargs: give it there",
    "max_logprobs logprobs_mode": "requests may ask for 20 log probabilities: leave it out",
    "max_images": "use --limit-mm-per-prompt image=N",
    "max_videos": "use --limit-mm-per-prompt video=N",
    "media_io_kwargs": "requests say how videos are sampled: leave it out",
    "enable_lora enable_loras lora_modules lora_paths lora max_loras max_lora_rank": _LORA,
    "guided_decoding_backend structured_outputs_config grammar_backend": "there is only one: leave it out",
    "runner task convert is_embedding embedding embeddings pooling rerank reranking override_pooler_config": _POOLING,
    # logs and metrics
    "disable_log_requests": "requests aren't logged unless --enable-log-requests is given",
    "uvicorn_log_level disable_uvicorn_access_log verbose v lv log_verbosity log_requests log_requests_level "
    "max_log_len": _LOGS,
    "disable_log_stats enable_metrics metrics slots decode_log_interval": "metrics are at /metrics: leave it out",
    "collect_detailed_traces enable_trace": "use --otlp-traces-endpoint",
    "allowed_methods allowed_headers allow_credentials": "pages of --allowed-origins may use every method and header, "
    "and no cookies: leave it out",
    "root_path api_prefix": "use a proxy that takes the prefix away",
    "insecure nowordwrap": "not needed here: leave it out",
}
"""Names as on a command line, without leading hyphens, and one sentence for them."""

INSTEAD = {name: sentence for names, sentence in _TABLE.items() for name in names.split()}
"""Flag of vLLM, SGLang, llama.cpp or Ollama, with underscores → what to do here."""

_COMMANDS = {
    "list ls rm": "downloaded models are in the Hugging Face Hub's cache: hf cache ls, hf cache rm",
    "ps": "use status --control HOST:PORT, or top --url URL",
    "show collect-env": "use doctor MODEL",
    "create convert": "use quantize MODEL OUT for a copy in 4 bits",
    "complete": "use run MODEL QUESTION, or a request to /v1/completions",
    "run-batch": "use serve MODEL, and send requests to it",
    "launch_server server": "use serve MODEL",
}

COMMANDS_INSTEAD = {name: sentence for names, sentence in _COMMANDS.items() for name in names.split()}
"""Command of another project → what to do here."""
