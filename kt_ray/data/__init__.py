"""Data: files to tokenised rows with loss on answers only, and rows to the passes of each step.

numpy at import; transformers and pyarrow only where a function needs them; never ray.
"""

from kt_ray.batch import Wave
from kt_ray.data.batches import Batches, eval_waves
from kt_ray.data.load import DataBundle, load_data
from kt_ray.data.preview import preview_rows, print_preview
from kt_ray.data.row_types import Pair, Row

__all__ = [
    "Batches",
    "DataBundle",
    "Pair",
    "Row",
    "Wave",
    "eval_waves",
    "load_data",
    "preview_rows",
    "print_preview",
]
