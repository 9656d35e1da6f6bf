"""The fixtures of run directories, which the trackers' tests have, too."""

from tests.tracking.conftest import add_checkpoint, make_config

__all__ = ["add_checkpoint", "make_config"]
