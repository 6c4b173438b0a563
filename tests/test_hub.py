"""Models by their names on the Hugging Face Hub, against a local server that speaks its API."""

import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support.checkpoints import make_checkpoint
from tests.support.exits import exit_code
from tests.support.hub_server import COMMIT, Hub, hub_server
from triptych.cli import fitting, flags, main
from triptych.config import EngineConfig
from triptych.errors import StartError
from triptych.hub import HubName

NAME = "org/Tiny-VL"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_checkpoint(tmp_path_factory.mktemp("hub") / "tiny", sharded=True)
    for name in ("README.md", "pytorch_model.bin", "consolidated.safetensors", "picture.png", "tiny.gguf"):
        (folder / name).write_bytes(b"not needed")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    return folder


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server() as hub:
        hub.models[NAME] = checkpoint
        use(hub.url, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield hub


def use(url: str, patch: pytest.MonkeyPatch) -> None:
    """What ``HF_ENDPOINT`` does when the client is imported."""
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


def refused(name: str = NAME) -> str:
    with pytest.raises(StartError) as refusal:
        flags.model_folder(name)
    assert len(str(refusal.value).splitlines()) == 1
    return str(refusal.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct", HubName("Qwen/Qwen2.5-VL-3B-Instruct", "main")),
        ("a/b@refs/pr/1", HubName("a/b", "refs/pr/1")),
        ("demo", None),
        ("./a/b", None),
        ("/a/b", None),
        ("a/b/c", None),
        ("../b", None),
        ("a/b@", None),
        ("a/b@../../x", None),
        ("a/b c", None),
        ("a/b@-x/..", None),
    ],
)
def test_names(text: str, expected: HubName | None) -> None:
    assert HubName.parse(text) == expected


def test_a_model_is_downloaded_once_and_only_what_is_read(hub: Hub, checkpoint: Path) -> None:
    folder = flags.model_folder(NAME)
    assert folder.name == COMMIT
    fetched = hub.fetched()
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= fetched
    assert not fetched & {"README.md", "pytorch_model.bin", "consolidated.safetensors", "picture.png", "tiny.gguf"}
    assert not (folder / "original").exists()
    for file in folder.iterdir():
        assert file.read_bytes() == (checkpoint / file.name).read_bytes()
    hub.requests.clear()
    assert flags.model_folder(f"{NAME}@v1") == folder
    assert flags.model_folder(f"{NAME}@{COMMIT}") == folder
    assert hub.fetched() == set()


def test_without_weights_only_small_files_are_downloaded(hub: Hub) -> None:
    folder = flags.model_folder(NAME, needs_weights=False)
    assert (folder / "config.json").is_file()
    assert not any(name.endswith(".safetensors") for name in hub.fetched())


def test_a_download_that_breaks_off_is_resumed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)
    hub.breaks = 2
    flags.model_folder(NAME)
    assert hub.ranges
    assert all(one.startswith("bytes=") for one in hub.ranges)


def test_a_token_goes_to_the_hub_alone(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated.add(NAME)
    assert f"{NAME}: it is gated, and HF_TOKEN isn't set: ask for access at {hub.url}/{NAME}" in refused()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    assert "the account of HF_TOKEN has no access" in refused()
    monkeypatch.setenv("HF_TOKEN", hub.token)
    assert flags.model_folder(NAME).is_dir()
    assert hub.tokens_elsewhere == []


def test_what_is_not_there_is_named(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused("org/none").startswith(f"org/none: there is no such folder, and no such model at {hub.url}/org/none")
    assert refused(f"{NAME}@v9") == f"{NAME}@v9: {NAME} has no revision 'v9'"
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.status = 503
    assert f"{hub.url} answered 503" in refused()


def test_without_a_connection_the_cache_is_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with monkeypatch.context() as patch:
            use(nowhere, patch)
            assert f"{nowhere} can't be reached" in refused()
        folder = flags.model_folder(NAME)
        use(nowhere, monkeypatch)
        assert flags.model_folder(NAME) == folder
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert flags.model_folder(NAME) == folder
    assert "HF_HUB_OFFLINE is set" in refused("org/other")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "bert"}, "model_type 'bert' is not served"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "load_in_4bit None is not served"),
    ],
)
def test_what_is_not_served_is_refused_before_weights(
    hub: Hub, checkpoint: Path, tmp_path: Path, change: dict[str, object], says: str
) -> None:
    copy = shutil.copytree(checkpoint, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    hub.models[NAME] = copy
    assert says in refused()
    assert not any(name.endswith(".safetensors") for name in hub.fetched())


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["tiny.gguf"], "tiny.gguf is a GGUF file: MODEL may be the path of one"),
        (["config.json", "pytorch_model.bin"], "pytorch_model.bin is pickled weights"),
        (["README.md"], "it has no config.json"),
    ],
)
def test_other_weights_are_called_what_they_are(
    hub: Hub, checkpoint: Path, tmp_path: Path, files: list[str], says: str
) -> None:
    hub.models[NAME] = tmp_path / "other"
    (tmp_path / "other").mkdir()
    for name in files:
        shutil.copy(checkpoint / name, tmp_path / "other" / name)
    assert says in refused()


def test_an_index_names_no_other_files(hub: Hub, checkpoint: Path, tmp_path: Path) -> None:
    hub.models[NAME] = copy = shutil.copytree(checkpoint, tmp_path / "copy")
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    assert "is not the name of a safetensors file in this folder" in refused()
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    hub.models["org/Other"] = copy
    assert refused("org/Other") == "org/Other: x.safetensors is missing"


def test_memory_and_disk_are_checked_before_weights(
    hub: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    text = config["text_config"] | {"vocab_size": 150_000, "hidden_size": 2000, "tie_word_embeddings": True}
    monkeypatch.setattr(fitting, "load_config", lambda _: {"text_config": text})
    monkeypatch.setattr(fitting, "available_bytes", lambda: 10_000_000_000)
    engine = EngineConfig(device="cpu")
    fitting.check_memory(NAME, engine, checkpoint, 10_000_000_000)
    says = r"can't serve it: 16.6 GB of weights, 10.0 GB of memory free; --quantization int8 needs about 8.9 GB"
    with pytest.raises(StartError, match=says):
        fitting.check_memory(NAME, engine, checkpoint, 16_600_000_000)
    fitting.check_memory(NAME, EngineConfig(device="cpu", quantization="int8"), checkpoint, 16_600_000_000)
    with pytest.raises(StartError, match=r"free$"):
        fitting.check_memory(NAME, engine, checkpoint, 166_000_000_000)
    shard = next(name for name in hub.files(NAME) if name.startswith("model") and name.endswith(".safetensors"))
    hub.sizes[shard] = 10**18
    assert "1000000000.0 GB are to be downloaded" in refused()
    assert not any(name.endswith(".safetensors") for name in hub.fetched())


def test_a_gpu_that_is_not_there_is_named_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fitting, "DEVICES", tmp_path)
    assert exit_code(["serve", "demo", "--device", "cuda:1"]) == 78
    assert "--device cuda:1: this machine has no GPU" in capsys.readouterr().err
    (tmp_path / "nvidia0").touch()
    fitting.check_device(EngineConfig(device="cuda"))
    fitting.check_memory(NAME, EngineConfig(device="cuda"), tmp_path, 10**18)  # not known before the start


def test_pull_prints_the_folder(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["pull", NAME]) == 0
    assert Path(capsys.readouterr().out.strip()).name == COMMIT
    with pytest.raises(SystemExit):
        main(["pull", "demo"])
    assert "not a name on the Hugging Face Hub" in capsys.readouterr().err


def test_a_file_is_called_what_it_is(tmp_path: Path) -> None:
    for name, says in (("x.gguf", "GGUF"), ("x.bin", "pickled"), ("x.txt", "it is a file;")):
        (tmp_path / name).touch()
        assert says in refused(str(tmp_path / name))
