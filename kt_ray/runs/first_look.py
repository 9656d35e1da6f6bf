"""What can be wrong with a command's files and directories, found before any large library is loaded."""

from __future__ import annotations

from kt_ray.config.schema import Config
from kt_ray.data.sources import require_files
from kt_ray.demo.builder import resolve_model_dir
from kt_ray.dims.config_json import dims_from_dir
from kt_ray.runs.rundir import refuse_taken

_OF_MODEL = ("train", "preview", "predict", "chat", "serve", "train_server")
_OF_ROWS = ("train", "preview", "predict")


def first_look(config: Config) -> None:
    """Looks for what the configuration names, without torch, transformers or Ray, and writes nothing.

    Raises:
        UserError: the run's name is taken, there is nothing to resume, or the model or a data file is absent.
    """
    if config.mode == "train":
        refuse_taken(config)
    on_hub = (config.model.path or "").startswith("hf://")  # looked for by `located`
    if config.mode in _OF_MODEL and config.model.path is not None and not on_hub:
        dims_from_dir(resolve_model_dir(config.model))
    if config.mode in _OF_ROWS:
        require_files(config.data)
