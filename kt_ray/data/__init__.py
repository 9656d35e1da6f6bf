"""Data: files to tokenised rows with loss on answers only, and rows to the passes of each step.

numpy at import; transformers and pyarrow only where a function needs them; never ray.
"""

from kt_ray.batch import Wave
from kt_ray.data.batches import Batches, epoch_order, eval_waves, micro_batch, wave
from kt_ray.data.load import DataBundle, load_data
from kt_ray.data.preview import PreviewRow, preview_pairs, preview_rows, print_preview
from kt_ray.data.row_types import Conversation, Dataset, Pair, Row
from kt_ray.data.token_counts import DataReport, SplitReport

__all__ = [
    "Batches",
    "Conversation",
    "DataBundle",
    "DataReport",
    "Dataset",
    "Pair",
    "PreviewRow",
    "Row",
    "SplitReport",
    "Wave",
    "epoch_order",
    "eval_waves",
    "load_data",
    "micro_batch",
    "preview_pairs",
    "preview_rows",
    "print_preview",
    "wave",
]
