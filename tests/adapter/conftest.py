"""Tiny models that transformers saved, as the tests of checkpoints have them."""

from tests.checkpoint.conftest import make_model  # noqa: F401
