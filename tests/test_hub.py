"""`python train.py --task gsm8k`, whose model and data come from a hub: here a server on 127.0.0.1.

The hub's libraries read their settings when they are imported, so each run is a process of its own.
"""

import hashlib
import io
import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import build
from tests.test_gsm8k import REAL

ROOT = Path(__file__).resolve().parent.parent
SMALL = "--steps 1 --prompts 2 --group-size 2 --max-tokens 8 --eval-items 2 --threads 1".split()
COMMIT = "c0ffee" + 34 * "0"
CARD = b"""---
configs:
- config_name: main
  data_files: [{split: train, path: main/train-*}, {split: test, path: main/test-*}]
---
"""


class Hub(BaseHTTPRequestHandler):
    """Answers with server.pages[path], where a commit is called main; not alive, it hangs up."""

    def do_GET(self):
        path = self.path.partition("?")[0].replace(COMMIT, "main")
        self.server.asked.append(path)
        if not self.server.alive:
            return
        body = self.server.pages.get(path, b"")
        self.send_response(200 if body else 404)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        if body:
            self.send_header("ETag", hashlib.sha1(body).hexdigest())
        else:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


def pages(kind: str, name: str, files: dict[str, bytes]) -> dict[str, bytes]:
    """What the hub answers about a repository: itself, its folders, its files."""
    api, base = f"/api/{kind}/{name}", name if kind == "models" else f"{kind}/{name}"
    about = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
    found = {api: about, f"{api}/revision/main": about}
    for file, body in files.items():
        folder, _, child = f"/{file}".rpartition("/")
        entry = {"type": "file", "path": file, "size": len(body), "oid": COMMIT}
        found.setdefault(f"{api}/tree/main{folder}", []).append(entry)
        if folder:
            above = found.setdefault(f"{api}/tree/main", [])
            above.append({"type": "directory", "path": folder[1:], "oid": COMMIT})
    found = {path: json.dumps(answer).encode() for path, answer in found.items()}
    return found | {f"/{base}/resolve/main/{file}": body for file, body in files.items()}


def as_parquet(rows: list[dict]) -> bytes:
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), stream)
    return stream.getvalue()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory) -> Path:
    return Path(build("qwen2", tmp_path_factory.mktemp("hub"), max_position_embeddings=2048))


@pytest.fixture(scope="module")
def problems(small_gsm8k) -> dict[str, list[dict]]:
    """Some lines of GSM8K's two splits; where the real ones are not at hand, sums."""
    folder = REAL if REAL.is_dir() else Path(small_gsm8k)
    files = {split: folder / f"{split}.jsonl" for split in ("train", "test")}
    return {
        split: [json.loads(line) for line in file.read_text().splitlines()[:20]]
        for split, file in files.items()
    }


@pytest.fixture
def hub(qwen, problems):
    """A hub that has the preset's model, in tiny, and a part of its data set."""
    data = {"README.md": CARD}
    for split, rows in problems.items():
        data[f"main/{split}-00000-of-00001.parquet"] = as_parquet(rows)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.alive, server.asked = True, []
    server.pages = pages("datasets", "openai/gsm8k", data)
    model = {file.name: file.read_bytes() for file in qwen.iterdir()}
    server.pages |= pages("models", "Qwen/Qwen2.5-0.5B-Instruct", model)
    Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def run(hub: ThreadingHTTPServer, folder: Path, name: str, *args) -> subprocess.CompletedProcess:
    """The command in small. FOLDER/cache is the cache of the hub's libraries."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    env |= {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}", "HF_HOME": str(folder / "cache")}
    env["NO_PROXY"] = "127.0.0.1"
    command = [sys.executable, "train.py", "--task", "gsm8k", *SMALL, "--out", str(folder / name)]
    return subprocess.run([*command, *args], cwd=ROOT, env=env, capture_output=True, text=True)


def test_the_hubs_model_learns_from_the_hubs_problems_also_from_the_cache(
    hub, qwen, problems, tmp_path
):
    runs = [run(hub, tmp_path, "first")]
    hub.alive, hub.asked = False, []
    runs.append(run(hub, tmp_path, "second"))
    assert len(hub.asked) == 1  # on their own the libraries ask for every file, with retries
    served = load_file(qwen / "model.safetensors")
    for done, name in zip(runs, ("first", "second"), strict=True):
        assert done.returncode == 0, done.stderr
        first, *_ = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        assert problems["test"][0]["question"][:30] in done.stdout + str(json.loads(first))
        trained = [load_file(file) for file in (tmp_path / name).rglob("model.safetensors")]
        for weights in trained:  # one step of 1e-6 moves no weight far
            torch.testing.assert_close(weights, served, rtol=0, atol=1e-4)
        assert trained


@pytest.mark.parametrize("local", ["nothing", "data"])
def test_without_hub_and_cache_the_command_ends_at_once_in_one_line(
    hub, local, small_gsm8k, tmp_path
):
    hub.alive = False
    data = ["--data", small_gsm8k] if local == "data" else []
    done = run(hub, tmp_path, "run", *data)
    assert done.returncode and len(hub.asked) == 1
    assert done.stderr.splitlines()[-1].startswith("error: ") and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
