"""The flags that users of vLLM, SGLang, llama.cpp and Ollama type: each works, or one sentence says what to do."""

import argparse
import dataclasses

import pytest

from tests.support.commands import flag_names, walked
from triptych.cli import flags, make_parser
from triptych.cli.other_projects import INSTEAD
from triptych.config import CONFIG_GROUPS, Settings

SAME = """
--host 127.0.0.1 --port 8001 --api-key k --api-key-file f --dtype bfloat16 --max-model-len 99 --max-num-seqs 9
--max-num-batched-tokens 99 --served-model-name m --tensor-parallel-size 2 --limit-mm-per-prompt {"image":2}
--allowed-local-media-path /srv --allowed-media-domains a.org --otlp-traces-endpoint http://a:4318/v1/traces
--enable-log-requests --block-size 32 --shutdown-timeout 7 --kv-cache-dtype int8 --enable-prefix-caching
--no-enable-prefix-caching --quantization int8 --device cpu --log-level info --threads 2
--ssl-keyfile f --ssl-certfile f
--allowed-origins a.org --tool-call-parser hermes
--reasoning-parser qwen3 --page-size 16
"""

ALIASES = {
    "-tp 2": ("tensor_parallel_size", "2"),
    "--tp 2": ("tensor_parallel_size", "2"),
    "--tp-size 2": ("tensor_parallel_size", "2"),
    "--kv-cache-memory-bytes 8589934592": ("kv_cache_memory", "8GiB"),
    "--enforce-eager": ("cuda_graphs", "False"),
    "--disable-cuda-graph": ("cuda_graphs", "False"),
    "--disable-radix-cache": ("enable_prefix_caching", "False"),
    "--no-cache-prompt": ("enable_prefix_caching", "False"),
    "--api-server-count 2": ("frontends", "2"),
    "-asc 2": ("frontends", "2"),
    "--context-length 99": ("max_model_len", "99"),
    "--max-running-requests 9": ("max_num_seqs", "9"),
    "--parallel 9": ("max_num_seqs", "9"),
    "-np 9": ("max_num_seqs", "9"),
    "--max-total-tokens 999": ("kv_cache_tokens", "999"),
    "-t 3": ("threads", "3"),
    "--alias m": ("served_model_name", "m"),
    "-a m": ("served_model_name", "m"),
    '--limit-mm-data-per-request {"image":2}': ("limit_mm_per_prompt", None),
    "--ssl-key-file /f": ("ssl_keyfile", "/f"),
    "--ssl-cert-file /f": ("ssl_certfile", "/f"),
    "--max_num_seqs 9": ("max_num_seqs", "9"),
    "--max_model_len=99": ("max_model_len", "99"),
}

EXPLAINED = """
--gpu-memory-utilization 0.9 --mem-fraction-static 0.9 --max-num-queued-reqs 9 --max-queued-requests 9
--mm-processor-cache-gb 4 --enable-auto-tool-choice --chat-template f --tokenizer f --revision r --download-dir f
--hf-token t --load-format auto --enable-lora --lora-modules a=b --speculative-config {} --mm-processor-kwargs {}
--generation-config vllm --seed 1 --model m --model-path m --chunked-prefill-size 99 --dp-size 2 -dp 2
--schedule-policy lpm --trust-remote-code --data-parallel-size 2 --disaggregation-mode prefill --encoder-only
--kv-transfer-config {} --swap-space 4 --pipeline-parallel-size 2 -pp 2 --enable-expert-parallel --ep-size 2
--enable-chunked-prefill --disable-log-requests --uvicorn-log-level info --cpu-offload-gb 4 --hf-overrides {}
--override-generation-config {} --max-logprobs 5 --media-io-kwargs {} --attention-backend FLASHINFER
--compilation-config {} --tokenizer-mode auto --runner generate --task generate --max-loras 2 --root-path /a
--distributed-executor-backend ray --scheduling-policy fcfs --skip-mm-profiling --mm-encoder-tp-mode data
--structured-outputs-config {} --async-scheduling --disable-log-stats
--enable-metrics --log-requests --nnodes 2 --node-rank 0 --dist-init-addr a:1 --is-embedding
--skip-tokenizer-init --enable-dp-attention --grammar-backend xgrammar --speculative-algorithm EAGLE --language-only
--hicache-ratio 2 -m f.gguf --model-url u -hf org/name -hff f -c 99 --ctx-size 99 -ngl 99 --n-gpu-layers 99 --no-mmproj
-b 99 --batch-size 99 -ub 9 -fa on --flash-attn on --jinja --cont-batching --mlock --no-mmap --cache-type-k q8_0
-ctv q8_0 --temp 0 --top-k 1 --n-predict 9 -n 9 --lora f --embedding --pooling mean --metrics --slots -md f
--draft-max 3 --tensor-split 1,1 --split-mode layer --verbose --keepalive 5m --format json --think --hidethinking
--nowordwrap --insecure
"""


def given(words: str) -> list[list[str]]:
    """Each flag with its value, if it has one."""
    found: list[list[str]] = []
    for word in words.split():
        if word.startswith("-"):
            found.append([word])
        else:
            found[-1].append(word)
    return found


@pytest.fixture(scope="module")
def serve() -> argparse.ArgumentParser:
    return next(parser for parser in walked(make_parser(["serve"])) if parser.prog == "triptych serve")


def groups_with(name: str) -> type[Settings]:
    return next(group for group in CONFIG_GROUPS if name in {item.name for item in dataclasses.fields(group)})


def test_there_are_enough_flags_to_say_so() -> None:
    assert len(given(SAME)) + len(ALIASES) + len(given(EXPLAINED)) >= 105


@pytest.mark.parametrize("words", given(SAME), ids=" ".join)
def test_flags_of_the_same_name_are_taken(serve: argparse.ArgumentParser, words: list[str]) -> None:
    parsed, unknown = serve.parse_known_args(["demo", *words])
    assert parsed.model == "demo"
    assert unknown == []


@pytest.mark.parametrize("words", ALIASES)
def test_other_names_set_the_same(serve: argparse.ArgumentParser, words: str) -> None:
    name, expected = ALIASES[words]
    parsed = serve.parse_args(["demo", *words.split()])
    if name.startswith("ssl"):
        assert expected in vars(parsed).values()
        return
    group = groups_with(name)
    value = getattr(flags.settings(group, parsed), name)
    assert value != getattr(group(), name)
    assert expected is None or str(value) == expected


@pytest.mark.parametrize("words", given(EXPLAINED), ids=" ".join)
def test_other_flags_are_explained_and_never_guessed(
    serve: argparse.ArgumentParser, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        serve.parse_known_args(["demo", *words])
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    sentence = said.partition(f"there is no {words[0]}: ")[2]
    assert len(sentence.split()) > 3
    assert "did you mean" not in said


def test_a_sentence_names_flags_that_exist(serve: argparse.ArgumentParser) -> None:
    for sentence in INSTEAD.values():
        for word in sentence.replace(",", " ").replace(":", " ").replace(";", " ").split():
            if word.startswith("--"):
                assert word in flag_names(serve), sentence


def test_a_flag_that_exists_has_no_sentence(serve: argparse.ArgumentParser) -> None:
    known = {option.lstrip("-").replace("-", "_") for option in flag_names(serve)}
    assert not known & INSTEAD.keys()


def test_in_variables_and_files_as_well(serve: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch) -> None:
    from triptych.config import EngineConfig
    from triptych.errors import ConfigError

    monkeypatch.setenv("TRIPTYCH_TP_SIZE", "2")
    assert str(flags.settings(EngineConfig, serve.parse_args(["demo"])).tensor_parallel_size) == "2"
    monkeypatch.setenv("TRIPTYCH_GPU_MEMORY_UTILIZATION", "0.9")
    with pytest.raises(ConfigError, match=r"GPU_MEMORY_UTILIZATION=0.9 is no setting: use --kv-cache-memory"):
        flags.settings(EngineConfig, serve.parse_args(["demo"]))
