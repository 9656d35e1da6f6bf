"""Models named as on the hub, by the real huggingface_hub against a server of this test's own."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from kt_ray import cli
from kt_ray.config.compose import expand
from kt_ray.config.schema import Config
from kt_ray.errors import TryAgain, UserError
from kt_ray.modes import plan
from kt_ray.runs import disk_room
from kt_ray.runs.model_hub import complete, located
from kt_ray.runs.prepare import prepare_model
from kt_ray.tools.export import export
from kt_ray.tools.inspect import inspect
from tests.helpers.composing import compose
from tests.helpers.hf_reference import build_chat_checkpoint, build_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "some-org/Tiny.MoE-v1"
SMALL = ("tokenizer_config.json", "tokenization_tiny.py", "tiktoken.model", "chat_template.jinja")


class Hub:
    """A hub with one repository."""

    def __init__(self, files: Path) -> None:
        self.files = files
        self.served: Counter[str] = Counter()  # bytes of each file

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path, _, _ = handler.path.partition("?")
        names = {
            str(p.relative_to(self.files)): p.stat().st_size for p in self.files.rglob("*") if p.is_file()
        }
        if re.fullmatch(rf"/api/models/{REPO}(/revision/(main|{COMMIT}))?", path):
            return _json(handler, {"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": n} for n in names]})
        if path == f"/api/models/{REPO}/tree/{COMMIT}":
            listed = [{"type": "file", "path": n, "size": s, "oid": f"{n}{s}"} for n, s in names.items()]
            return _json(handler, listed)
        prefix = f"/{REPO}/resolve/{COMMIT}/"
        if path.startswith(prefix) and path.removeprefix(prefix) in names:
            return self._file(handler, path.removeprefix(prefix))
        handler.send_response(404)
        handler.send_header("X-Error-Code", "RevisionNotFound" if REPO in path else "RepoNotFound")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    def _file(self, handler: BaseHTTPRequestHandler, name: str) -> None:
        data = (self.files / name).read_bytes()
        asked = re.match(r"bytes=(\d+)-", handler.headers.get("Range") or "")
        start = int(asked[1]) if asked else 0
        handler.send_response(206 if asked else 200)
        for key, value in {
            "ETag": f'"{name.replace("/", "-")}-{len(data)}"',
            "X-Repo-Commit": COMMIT,
            "Content-Length": str(len(data) - start),
            "Accept-Ranges": "bytes",
            **({"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if asked else {}),
        }.items():
            handler.send_header(key, value)
        handler.end_headers()
        if handler.command == "GET":
            self.served[name] += len(data) - start
            handler.wfile.write(data[start:])


def _json(handler: BaseHTTPRequestHandler, value: Any) -> None:
    data = json.dumps(value).encode()
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("hub"), "deepseek_v3")


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Beside the model: what nobody needs."""
    files = tmp_path / "repository"
    shutil.copytree(checkpoint, files)
    for name in SMALL:
        (files / name).write_text("{}")
    (files / "original").mkdir()
    for name in ("pytorch_model.bin", "model.gguf", "original/model.safetensors", "original/config.json"):
        (files / name).write_bytes(b"not needed")
    served = Hub(files)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.answer(self)

        do_HEAD = do_GET

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + template[template.index("/{repo_id}") :]
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield served
    server.shutdown()
    server.server_close()


def here(config: Config) -> Path:
    folder = located(config).model.path
    assert folder is not None
    return Path(folder)


def test_a_name_of_the_hub_is_a_path() -> None:
    implied = ["data=jsonl", "model=custom", "model.path=hf://Qwen/Qwen3-235B-A22B", "mode=plan"]
    assert expand(["model=Qwen/Qwen3-235B-A22B", "mode=plan"]) == implied
    assert expand(["model=hf://Qwen/Qwen3-235B-A22B", "mode=plan"]) == implied
    for revision in ("main", "refs/pr/1"):
        config = compose(["mode=plan", f"model=some-org/Tiny.MoE-v1@{revision}"])
        named = (config.model.path, config.model.name)
        assert named == (f"hf://some-org/Tiny.MoE-v1@{revision}", "Tiny.MoE-v1")
    assert expand(["model=kt_ray/dims"])[-1] == "model=kt_ray/dims"  # a directory: the error names model.path
    assert expand(["model=/data/a"])[-1] == "model=/data/a"


def test_a_plan_needs_no_more_than_what_tells_formats(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    """ModelOpt's older releases state their format in a file of its own."""
    own = hub.files / "hf_quant_config.json"
    own.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    assert cli.run(compose(["mode=plan", f"model={REPO}", "plan.rates=nominal"])) == plan.FITS
    assert "experts nvfp4, the rest" in capsys.readouterr().out
    assert set(hub.served) == {"config.json", own.name}


def test_training_fetches_the_files_it_needs_once(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = compose(["data=demo", f"model.path=hf://{REPO}@main", "cluster=local", f"run.root={tmp_path}"])
    config = located(given)
    assert not any(name.endswith(".safetensors") for name in hub.served)
    prepared = prepare_model(config, training=True)
    assert "downloading some-org/Tiny.MoE-v1: 1 files" in capsys.readouterr().out
    assert Path(prepared.model_dir) == tmp_path / f"cache/models--some-org--Tiny.MoE-v1/snapshots/{COMMIT}"
    assert hub.served["model.safetensors"] == (hub.files / "model.safetensors").stat().st_size
    assert set(hub.served) == {"model.safetensors", "config.json", "generation_config.json", *SMALL}
    before = hub.served.copy()
    prepare_model(located(given), training=True)
    assert hub.served == before  # nothing twice


def test_an_adapter_names_its_base_as_the_hub_does(hub: Hub, tmp_path: Path) -> None:
    hub.files = build_chat_checkpoint(tmp_path / "chat")
    given = ["data=demo", f"model={REPO}", "cluster=local", f"run.root={tmp_path}", "trainer.max_steps=1"]
    given += ["eval.after_training=0", "tracking.plot=false", "data.limit=24", "trainer.batch_size=2"]
    assert cli.main([*given, "run.name=a"]) == 0
    adapter = tmp_path / "a" / "adapter"
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (REPO, COMMIT)
    readme = (adapter / "README.md").read_text()
    assert f'from_pretrained("{REPO}", revision="{COMMIT}")' in readme
    assert f"vllm serve {REPO} --revision {COMMIT} " in readme and "snapshots" not in readme

    before = hub.served.copy()
    assert inspect(adapter)["model_type"] == "deepseek_v3"
    export(adapter, tmp_path / "fused", "peft-fused")
    exported = json.loads((tmp_path / "fused" / "adapter_config.json").read_text())
    assert (exported["base_model_name_or_path"], exported["revision"]) == (REPO, COMMIT)
    assert cli.main([*given, "run.name=b", f"lora.adapter={adapter}"]) == 0
    assert hub.served == before
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(UserError, match=rf"{REPO}.*name it: --base DIR"):
        export(adapter, tmp_path / "again", "peft-fused")
    assert inspect(adapter)["model_type"] is None


def test_a_model_that_does_not_fit_is_not_downloaded(hub: Hub) -> None:
    def refuse() -> None:
        raise UserError("the plan does not fit")

    folder = here(compose(["mode=train", "data=demo", f"model={REPO}"]))
    with pytest.raises(UserError, match="does not fit"):
        complete(str(folder), refuse)
    assert "model.safetensors" not in hub.served


def shards(hub: Hub) -> list[str]:
    """Two, named by an index, and a third that it does not name."""
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in (*names, "consolidated.safetensors"):
        (hub.files / name).write_bytes(name.encode() * 100)
    (hub.files / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": names[0], "b": names[1], "c": names[0]}})
    )
    return names


def test_only_the_shards_of_the_index(hub: Hub) -> None:
    names = shards(hub)
    folder = here(compose(["mode=train", "data=demo", f"model={REPO}"]))
    complete(str(folder), lambda: None)
    assert sorted(p.name for p in folder.glob("*.safetensors")) == names
    complete(str(folder), lambda: pytest.fail("nothing is missing"))


def test_a_download_that_breaks_off_goes_on_with_the_files_that_are_missing(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = shards(hub)
    folder = here(compose(["mode=train", "data=demo", f"model={REPO}"]))
    get = huggingface_hub.file_download.http_get

    def half(url: str, *args: Any, **options: Any) -> None:
        if url.endswith(second):
            while not (folder / first).is_file():  # they are fetched side by side
                time.sleep(0.01)
            raise ConnectionError("the network is gone")
        get(url, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.file_download, "http_get", half)
        with pytest.raises(TryAgain, match=r"broke off.*network is gone.*run the same command again"):
            complete(str(folder), lambda: None)
    before = hub.served.copy()
    complete(str(folder), lambda: None)
    assert (folder / second).read_bytes() == (hub.files / second).read_bytes()
    assert set(hub.served - before) == {second}


def test_too_small_a_disk_is_refused_before_the_first_byte(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_room, "free_bytes", lambda path: 1000)
    folder = here(compose(["mode=train", "data=demo", f"model={REPO}"]))
    with pytest.raises(UserError, match=r"no room for this model.*required .* of free space.*HF_HOME"):
        complete(str(folder), lambda: None)
    assert "model.safetensors" not in hub.served


def test_names_that_the_hub_does_not_have(hub: Hub) -> None:
    for name in ("nobody/nothing", f"{REPO}@v9"):
        with pytest.raises(UserError, match=r"the hub has no such model; at hf://.*hf auth login"):
            located(compose(["mode=plan", f"model={name}"]))
    with pytest.raises(UserError, match=r"no name on the Hugging Face hub.*required hf://ORGANISATION/NAME"):
        located(compose(["mode=plan", "model.path=hf://nothing"]))
    (hub.files / "config.json").unlink()
    with pytest.raises(UserError, match=r"holds no config\.json"):
        located(compose(["mode=plan", f"model={REPO}"]))


def test_terms_that_were_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: Any, **options: Any) -> None:
        response: Any = SimpleNamespace(headers={}, request=None, status_code=403, text="", url="")
        raise huggingface_hub.errors.GatedRepoError("gated", response=response)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refused)
    with pytest.raises(UserError, match=r"terms; at https://huggingface\.co/some-org/x.*hf auth login"):
        located(compose(["mode=plan", "model=some-org/x"]))


def test_without_a_network_the_cache_serves_or_the_command_is_named(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = here(compose(["mode=train", "data=demo", f"model={REPO}"]))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert here(compose(["mode=train", "data=demo", f"model={REPO}"])) == folder
    with pytest.raises(UserError, match=rf"hf download {REPO} --revision.*--include '\*\.safetens"):
        complete(str(folder), lambda: None)
    with pytest.raises(UserError, match=r"hf download a/b --include 'config\.json' --include 'hf_q.*=DIR"):
        located(compose(["mode=plan", "model=a/b"]))


def test_other_directories_are_left_alone(tmp_path: Path) -> None:
    complete(str(tmp_path), lambda: pytest.fail("not the hub's"))
    config = compose(["mode=plan", f"model.path={tmp_path}"])
    assert located(config) is config
