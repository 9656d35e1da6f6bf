"""The demo: a small DeepSeek-V3, its tokenizer and its data set, all made by the project itself.

Nothing here downloads anything. torch and transformers are imported when a model is built.
"""

from kt_ray.demo.builder import ensure_demo_model, resolve_model_dir
from kt_ray.demo.recipes import persona_path

__all__ = ["ensure_demo_model", "persona_path", "resolve_model_dir"]
