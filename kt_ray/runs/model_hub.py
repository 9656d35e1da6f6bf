"""Models by their names on the Hugging Face hub: model=ORG/NAME, or model.path=hf://ORG/NAME[@REVISION].

Downloads go to the cache of huggingface_hub (HF_HOME), which tries again when the network falters, shows its
progress, and keeps every file that is whole: the same command goes on with the others. First comes what is
small: config.json says whether the model can be trained here. Its weights come once the plan holds. Python
code of a repository is never run; that of a tokenizer is fetched to be read (data/tiktoken_file.py).
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from kt_ray.config.files import HUB_NAME
from kt_ray.config.mapping import with_keys
from kt_ray.config.schema import Config
from kt_ray.errors import TryAgain, UserError
from kt_ray.parse import read_json
from kt_ray.runs.disk_room import gigabytes, require_room
from kt_ray.tracking.console import say

T = TypeVar("T")
_SNAPSHOT = re.compile(
    r".*/models--(?P<org>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/(?P<commit>[0-9a-f]{40})", re.ASCII
)
_INDEX = "model.safetensors.index.json"
_SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "tokenization_*.py")
_PLANNED = ("config.json", "hf_quant_config.json")  # of which few releases have the second (ModelOpt's)
_WITHOUT_MODEL = ("report", "compare")


def located(config: Config) -> Config:
    """The configuration with the local directory of a model that is named as on the hub, without weights.

    Raises:
        UserError: no such name, no permission, or no network and nothing in the cache.
    """
    given = config.model.path
    if given is None or not given.startswith("hf://") or config.mode in _WITHOUT_MODEL:
        return config
    name = HUB_NAME.fullmatch(given)
    if name is None:
        raise UserError(
            "this is no name on the Hugging Face hub",
            where="model.path",
            observed=given,
            required="hf://ORGANISATION/NAME, or hf://ORGANISATION/NAME@REVISION",
            remedy="set model.path=hf://Qwen/Qwen3-30B-A3B, or a directory",
        )
    small = _PLANNED if config.mode == "plan" else _SMALL

    def fetch(download: Callable[..., Any]) -> str:
        return str(
            download(name["repo"], revision=name["revision"], allow_patterns=small, ignore_patterns="*/*")
        )

    folder = _asked(fetch, name["repo"], name["revision"], small)
    if not (Path(folder) / "config.json").is_file():
        raise UserError(
            "the hub's repository holds no config.json",
            where=given,
            required="a model in the format of transformers",
            remedy="name the repository with *.safetensors (a GGUF file is model.experts_path)",
        )
    return with_keys(config, {"model.path": folder})


def published(model_dir: str) -> tuple[str, str | None]:
    """ORG/NAME and commit of a model in the hub's cache; of another directory its path and None."""
    found = _SNAPSHOT.fullmatch(model_dir)
    return (model_dir, None) if found is None else (f"{found['org']}/{found['name']}", found["commit"])


def complete(model_dir: str, check: Callable[[], None]) -> None:
    """Download the weights that a model in the hub's cache lacks. Another directory is left as it is.

    Args:
        check: raises where the model could not be used anyway; called before a download.

    Raises:
        UserError: no room, no network, no permission. TryAgain: the download broke off.
    """
    folder = Path(model_dir)
    repo, commit = published(model_dir)
    if commit is None:
        return
    shards = _shards(folder)
    if shards and all((folder / shard).is_file() for shard in shards):
        return
    check()
    wanted = [glob.escape(shard) for shard in shards] or ["*.safetensors"]

    def look(download: Callable[..., Any]) -> list[Any]:
        files = download(repo, revision=commit, allow_patterns=wanted, ignore_patterns="*/*", dry_run=True)
        return [file for file in files if file.will_download]

    missing = _asked(look, repo, commit, wanted)
    if not shards and not missing and not any(folder.glob("*.safetensors")):
        raise UserError(
            "the hub's repository holds no *.safetensors",
            where=repo,
            remedy="name the repository with the weights in safetensors, or convert them",
        )
    size = sum(file.file_size for file in missing)
    require_room(
        "the disk has no room for this model", size, folder, "HF_HOME to a directory on a larger disk"
    )
    say(
        f"downloading {repo}: {len(missing)} files, {gigabytes(size)}, to {folder}; "
        "if this is interrupted, the same command goes on with the files that are missing"
    )
    from huggingface_hub import snapshot_download

    try:
        snapshot_download(repo, revision=commit, allow_patterns=wanted, ignore_patterns="*/*")
    except Exception as error:  # of the network and of the disk
        raise TryAgain(
            "the download broke off",
            where=repo,
            observed=_first_line(error),
            remedy="run the same command again: it goes on with the files that are missing",
        ) from error


def _shards(folder: Path) -> list[str]:
    """Names of the weight files; none where nothing says so yet."""
    index = folder / _INDEX
    if index.is_file():
        weights = read_json(index, "the index of the weights", "download it again").get("weight_map")
        return sorted({str(shard) for shard in weights.values()}) if isinstance(weights, dict) else []
    return ["model.safetensors"] if (folder / "model.safetensors").is_file() else []


def _asked(
    ask: Callable[[Callable[..., Any]], T], repo: str, revision: str | None, files: Sequence[str]
) -> T:
    """What the hub answers to `ask`, which gets snapshot_download.

    Raises:
        UserError: it refuses or cannot be reached.
    """
    from huggingface_hub import errors, snapshot_download

    try:
        return ask(snapshot_download)
    except errors.GatedRepoError as error:
        raise UserError(
            "the hub lets only those in who have accepted this model's terms",
            where=f"https://huggingface.co/{repo}",
            remedy="accept them on that page and log in once with 'hf auth login'",
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise UserError(
            "the hub has no such model",
            where=f"hf://{repo}" + (f"@{revision}" if revision else ""),
            observed=_first_line(error),
            remedy="correct the name, or, if it is private, log in once with 'hf auth login'",
        ) from error
    except Exception as error:  # of the network, in many classes
        line = f"hf download {repo}" + (f" --revision {revision}" if revision else "")
        line += "".join(f" --include '{file}'" for file in _hub_patterns(files))
        raise UserError(
            "the Hugging Face hub does not answer, and its cache here does not hold the model",
            where=f"hf://{repo}",
            observed=_first_line(error),
            remedy=f"where there is a network, run {line} --local-dir DIR; bring DIR here, and set "
            "model.path=DIR",
        ) from error


def _hub_patterns(files: Sequence[str]) -> list[str]:
    """What a whole directory for training needs, or one for a plan."""
    return [*_PLANNED] if files == _PLANNED else [*_SMALL, "*.safetensors"]


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
