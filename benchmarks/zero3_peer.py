"""The `hf` peer under DeepSpeed ZeRO-3 with parameters and optimizer offloaded, on a CPU.

    zero3, zero3_ckpt    without and with gradient checkpointing

One process, gloo: nothing is exchanged and nothing crosses a PCIe bus, so this measures what gathering and
partitioning parameters around every module costs on a CPU beside the model's own computing, not what
ZeRO-Offload does on a GPU. Experts are frozen (grouped_mm), LoRA is on every other linear, its master weights
and moments in float32 (DeepSpeedCPUAdam); the model, LoRA included, computes in bfloat16.

DeepSpeed compiles two extensions on first use, about a minute; they stay in $TORCH_EXTENSIONS_DIR, by default
~/.cache/kt_ray/torch_extensions, and `compiled` in the record says whether that run had to.
"""

from __future__ import annotations

import os
import socket
import time
import warnings
from pathlib import Path
from typing import Any

# Read when deepspeed is imported.
os.environ["DS_ACCELERATOR"] = "cpu"
_EXTENSIONS = Path(
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path.home() / ".cache" / "kt_ray" / "torch_extensions"))
)

import torch  # noqa: E402
from peers import load_peer  # noqa: E402

from kt_ray.config.schema import Config  # noqa: E402
from kt_ray.data import Batches, load_data  # noqa: E402
from kt_ray.optim.optimizers import learning_rate  # noqa: E402


def engine_config(config: Config) -> dict[str, Any]:
    """DeepSpeed's configuration: its defaults but for what the comparison fixes."""
    trainer = config.trainer
    accumulate = trainer.batch_size // config.micro_batch_rows(1)
    cpu = {"device": "cpu", "pin_memory": False}  # there is nothing to pin for
    return {
        "train_batch_size": trainer.batch_size,
        "train_micro_batch_size_per_gpu": config.micro_batch_rows(1),
        "gradient_accumulation_steps": accumulate,
        "gradient_clipping": config.optim.max_grad_norm or 0.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": cpu, "offload_optimizer": cpu},
        "steps_per_print": 10**9,
    }


class Zero3Peer:
    """A model, partitioned, and its engine; `step` as in peers.Peer.

    Raises:
        ValueError: micro-batches of unequal number per step, or a model that is not bfloat16.
    """

    def __init__(self, impl: str, config: Config, model_dir: str, total_steps: int) -> None:
        self.config, self.total_steps = config, total_steps
        trainer = config.trainer
        if trainer.batch_size % config.micro_batch_rows(1):
            raise ValueError("trainer.batch_size must be a multiple of trainer.micro_batch_size")
        had = _EXTENSIONS.is_dir() and any(_EXTENSIONS.rglob("*.so"))
        _single_process()
        begun = time.monotonic()
        with warnings.catch_warnings():  # of packages that it builds with
            warnings.simplefilter("ignore")
            import deepspeed
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            deepspeed.init_distributed(dist_backend="gloo")
        imported = time.monotonic()
        data = load_data(config, model_dir, config.seed)
        self.batches = Batches(
            data.train,
            trainer.batch_size,
            config.micro_batch_rows(1),
            shuffle=config.data.shuffle,
            seed=config.seed,
            pad_id=data.pad_id,
        )
        self.model = load_peer("hf_ckpt" if impl.endswith("_ckpt") else "hf", config, model_dir)
        if self.model.dtype != torch.bfloat16:
            raise ValueError(f"the checkpoint is in {self.model.dtype}, required torch.bfloat16")
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.trainable_parameters = sum(p.numel() for p in parameters)  # before they are partitioned
        loaded = time.monotonic()
        optim = config.optim
        optimizer = DeepSpeedCPUAdam(
            parameters, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=optim.weight_decay
        )
        self.engine, *_ = deepspeed.initialize(
            model=self.model, optimizer=optimizer, config=engine_config(config)
        )
        self.facts = {
            "compiled": not had,
            "init_seconds": round(imported - begun + time.monotonic() - loaded, 2),
            "deepspeed": deepspeed.__version__,
        }

    def step(self, index: int) -> dict[str, float]:
        """Optimizer step `index` (0-based): seconds, tokens, loss (token mean), and seconds by term."""
        start = time.perf_counter()
        micro = self.batches.waves(index)[0][0][0]
        divisor = sum(batch.loss_tokens for batch in micro)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = learning_rate(self.config.optim, index, self.total_steps)
        loss = forward = backward = update = 0.0
        for number, batch in enumerate(micro):
            begun = time.perf_counter()
            width = batch.input_ids.shape[1]
            mask_BS = torch.arange(width)[None, :] < torch.from_numpy(batch.lengths)[:, None]
            part = self.engine(
                input_ids=torch.from_numpy(batch.input_ids),
                attention_mask=mask_BS.long(),
                labels=torch.from_numpy(batch.labels),
                num_items_in_batch=divisor,
                use_cache=False,
            ).loss
            between = time.perf_counter()
            loss += float(part.detach())
            # The engine divides by the number of micro-batches; the loss has its divisor already.
            self.engine.backward(part * len(micro))
            after = time.perf_counter()
            self.engine.step()
            forward += between - begun
            backward += after - between
            if number == len(micro) - 1:
                update = time.perf_counter() - after
        return {
            "seconds": time.perf_counter() - start,
            "tokens": float(sum(batch.tokens for batch in micro)),
            "loss": loss,
            "grad_norm": float(self.engine.get_global_grad_norm() or 0.0),
            "seconds_forward": forward,
            "seconds_backward": backward,
            "seconds_optimizer": update,
        }


def _single_process() -> None:
    """A process group of one, on a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
