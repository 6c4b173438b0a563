"""triptych-dynamo under the driver and the adapter that Dynamo publishes, in vLLM's environment: ``scripts/test-vllm``.

A process there gets URLs of images, one a line, and says for each what Dynamo's worker would give vLLM, or its error.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import ROOT
from tests.support.ec_vllm import VARIABLE
from tests.support.serving import image, image_part, served
from tests.support.vllm_checkpoints import SHAPES
from triptych.client import EncodeClient

DYNAMO = "TRIPTYCH_TEST_DYNAMO"
"""Names a folder with Dynamo's packages."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(DYNAMO not in os.environ, reason=f"{DYNAMO} names no folder with Dynamo (scripts/setup-peers)"),
]
WORKER = """
import asyncio, json, sys
from types import SimpleNamespace
from dynamo.vllm.multimodal_utils.custom_encoder import (
    AsyncVisionEncoder, VisionEncoderBackend, create_custom_encoder_adapter
)
from triptych_dynamo import TriptychEncoder

assert issubclass(TriptychEncoder, VisionEncoderBackend)
backend = TriptychEncoder()
hf_config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
architectures = ["Qwen3VLForConditionalGeneration"]
config = SimpleNamespace(hf_config=hf_config, architectures=architectures, architecture=architectures[0])
adapter = create_custom_encoder_adapter(backend, config, None)
encoder = AsyncVisionEncoder(backend)

async def one(urls):
    try:
        prompt = adapter.prepare_prompt([1, 2], await encoder.encode(urls))
    except Exception as error:
        return {"error": type(error).__name__, "says": str(error)}
    image = prompt["multi_modal_data"]["image"]
    return {"rows": image["image_embeds"].tolist(), "grids": image["image_grid_thw"].tolist()}

async def every(requests):
    return await asyncio.gather(*map(one, requests))

encoder.load("model")
print(json.dumps(asyncio.run(every(json.load(sys.stdin)))))
encoder.shutdown()
"""


def ask(url: str, requests: list[list[str]]) -> subprocess.CompletedProcess[str]:
    path = (ROOT, ROOT / "integrations/dynamo", os.environ[DYNAMO])
    return subprocess.run(
        [Path(os.environ[VARIABLE]) / "bin/python", "-c", WORKER],
        input=json.dumps(requests),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path)), "TRIPTYCH_ENCODE_URL": url},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def url_of(data: bytes) -> str:
    url: str = image_part(data)["image_url"]["url"]
    return url


def test_requests_of_a_worker(tmp_path: Path) -> None:
    """At once: one with two images, one of which no other can be told apart from, and one that is refused alone."""
    folder = SHAPES["qwen3-vl"](tmp_path / "qwen3-vl")
    first, second = url_of(image(96, 64)), url_of(image(160, 200, 1))
    with served(folder, "1E1PD") as service:
        requests = [[first, second], [url_of(b"no image")], [second], ["file:///etc/hostname"]]
        done = ask(service.url, requests)
        assert done.returncode == 0, done.stderr[-3000:]
        found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
        with EncodeClient(service.url) as client:
            expected = [client.encode(one)[0] for one in (first, second)]
    both, refused, alone, outside = found
    assert both["grids"] == [list(one.grid_thw) for one in expected]
    assert both["rows"] == [row for one in expected for row in one.rows.tolist()]
    assert alone["rows"] == expected[1].rows.tolist()
    assert refused["error"] == outside["error"] == "ValueError"
    assert "image" in refused["says"]


def test_a_service_that_isnt_there_is_no_fault_of_the_request() -> None:
    done = ask("http://127.0.0.1:9", [[url_of(image())]])
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = json.loads(done.stdout.splitlines()[-1])
    assert found["error"] == "RuntimeError"
