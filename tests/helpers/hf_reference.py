"""The reference of parity tests: tiny random checkpoints, and what plain Hugging Face makes of them.

path = build_checkpoint(tmp_path, "deepseek_v3", expert_dtype=torch.bfloat16)
reference = Reference(path, LoraConfig(rank=4), seed=0)
reference.randomize_b(1)                        # B starts at zero: its gradient alone would be tested
result = reference.run(rows, step=0)            # rows: list of Row
result.logits, result.loss, result.grads, result.expert_ids
"""

from tests.helpers.reference.checkpoint import build_chat_checkpoint, build_checkpoint
from tests.helpers.reference.families import FAMILIES, SMALL
from tests.helpers.reference.routing import find_router, forced_routing
from tests.helpers.reference.rows import Row, loss_tokens, micro_batch, random_rows
from tests.helpers.reference.run import ExpertIds, Reference, ReferenceResult

__all__ = [
    "FAMILIES",
    "SMALL",
    "ExpertIds",
    "Reference",
    "ReferenceResult",
    "Row",
    "build_chat_checkpoint",
    "build_checkpoint",
    "find_router",
    "forced_routing",
    "loss_tokens",
    "micro_batch",
    "random_rows",
]
