"""What both kinds of actors share: a mailbox, a port, their status, and what they train, by name."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from kt_ray.actors.watch import Status
from kt_ray.adapter.adapter_dir import write_tensors
from kt_ray.adapter.from_peft import AdapterReader
from kt_ray.adapter.peft_config import WEIGHTS
from kt_ray.batch import REFERENCE, WHOLE, LoraPart
from kt_ray.checkpoint.safetensors_file import damaged
from kt_ray.checkpoint.training import ShardInfo, read_named_into, write_shard
from kt_ray.config.schema import OptimConfig
from kt_ray.errors import UserError
from kt_ray.experts import LocalExpertsSpec
from kt_ray.model.lora_part import limit
from kt_ray.model.stage_spec import StageSpec, StartAdapter
from kt_ray.optim.optimizers import gradient_norms, state_kinds, use_torch_threads
from kt_ray.placement.plan_types import Plan
from kt_ray.pulse import beat, beats
from kt_ray.timeline import name_thread
from kt_ray.transport.messages import Address, LocalPort, Mailbox, Message, Port


class PlainActor(ABC):
    """A plain class; Ray or a thread calls it. `deliver`, `abort` and `status` may run beside the compute
    thread.

    Args:
        plan: the whole plan.
        address: which of its actors this is.
        spec: what it is built from.
        optim: of what it trains.
        timeout: seconds that one transfer through gloo may take.

    Attributes:
        name: "worker-0", "experts-1"; title: the same for people.
        port: sends messages; set before the first pass.
        doing: what the compute thread is doing now.
        load_progress: (layer, bytes done, bytes in total).
        reborn: restarted after a death: its weights are loaded, its trained state is lost. It computes
            nothing until the state is restored.
    """

    def __init__(
        self,
        plan: Plan,
        address: Address,
        spec: StageSpec | LocalExpertsSpec,
        optim: OptimConfig,
        timeout: float,
    ) -> None:
        self.plan = plan
        self.rank = address[1]
        self.name = f"{address[0]}-{self.rank}"
        self.title = title(address)
        self.optim = optim
        self.timeout = timeout
        self.mailbox = Mailbox(self.title)
        self.port: Port = LocalPort({})
        self.host_name = socket.gethostname()
        self._doing = "starting"
        self.load_progress = (0, 0, 0)
        self.reborn = False
        self._spec = spec
        self._committed = -1  # the last step whose gradients were applied
        # trainings put aside: their tensors on the host, and the steps that they took
        self._aside: dict[str, tuple[list[Tensor], int]] = {}

    # -- memory of GPUs -----------------------------------------------------------------------

    @abstractmethod
    def _gpus(self) -> tuple[str, ...]:
        """Names of the budgets of the GPUs that it computes on."""

    @abstractmethod
    def _frees_gpu(self) -> str:
        """Options that take less of their memory, to be set."""

    @contextmanager
    def gpu_memory(self) -> Iterator[None]:
        """Inside, memory that runs out on a GPU is reported beside what the plan counted."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            own = self._gpus()
            planned = [b.total for b in self.plan.budgets if b.device in own]
            counted = " and ".join(f"{total / 2**30:.2f} GiB" for total in planned)
            raise UserError(
                "GPU memory ran out",
                where=f"{self.title} on {', '.join(own)}: {self.doing}",
                observed=str(error).partition("If reserved but")[0].strip(),
                required=f"the plan counts {counted}" if planned else None,
                remedy=f"end what else uses this GPU (nvidia-smi lists it), or set {self._frees_gpu()}",
            ) from error

    # -- life --------------------------------------------------------------------------------

    @abstractmethod
    def _load(self) -> None:
        """Read weights, make LoRA."""

    @abstractmethod
    def _facts(self) -> dict[str, Any]:
        """What `info` says beside process and host."""

    @abstractmethod
    def close(self) -> None:
        """Give memory and threads back."""

    def load(self, again: bool = False) -> dict[str, Any]:
        """Read weights, make LoRA. Returns `info`."""
        self.claim_thread()
        self.doing = "loading"
        self._load()
        start = self._spec.start
        # A new actor's LoRA comes from a checkpoint, if there is one: then the adapter may be gone.
        if start is not None and (start.reference or not again):
            self._read_start(start)
            if start.reference:
                self.keep_adapter(REFERENCE, copy=True)
        self.doing = "idle"
        return self.info()

    def load_again(self) -> dict[str, Any]:
        """As `load`, for an actor that replaces a dead one."""
        facts = self.load(again=True)
        self.reborn = True
        return facts

    def _read_start(self, start: StartAdapter) -> None:
        """The adapter that the run starts from, in place of initial LoRA where it has any.

        Raises:
            UserError: it is gone, or another than when the run began.
        """
        found = "no such file"
        if Path(start.directory, WEIGHTS).is_file():
            reader = AdapterReader(start.directory, self._spec.model_dir)
            found = f"digest {reader.digest[:12]}"
        if found != f"digest {start.digest[:12]}":
            raise damaged(
                "the adapter that the run starts from is gone or has changed",
                f"{start.directory}/{WEIGHTS} on {self.host_name}",
                found,
                f"digest {start.digest[:12]}, as when the run began",
                "put the former files back, where all nodes find them",
            )
        reader.read_into(self.lora("param").items(), self._spec.lora, others="kept")

    def info(self) -> dict[str, Any]:
        """Facts about this actor for env.json."""
        return {"actor": self.name, "pid": os.getpid(), "host": self.host_name, **self._facts()}

    def claim_thread(self, threads: int | None = None) -> None:
        """Set what the system and torch keep per thread: its name, and torch's number of threads.

        Every time: Ray names the thread after each call's method. The same number of torch threads under Ray
        and in one process gives the same bits.

        Args:
            threads: None = the planned ones.
        """
        name_thread(f"kt-{self.name}")
        use_torch_threads(self._threads if threads is None else threads)

    @property
    @abstractmethod
    def _threads(self) -> int:
        """As planned."""

    def check_restored(self) -> None:
        """Raises RuntimeError on a restarted actor: it must not continue from its initial adapter."""
        if self.reborn:
            raise RuntimeError(
                f"{self.title} was restarted: its weights are loaded again, its trained state is lost; "
                "restore a checkpoint first"
            )

    # -- beside the compute thread -----------------------------------------------------------

    def deliver(self, message: Message) -> None:
        """Take a message from a peer."""
        self.mailbox.put(message)

    def abort(self, reason: str) -> None:
        """Another actor failed: end the wait for a message with an error."""
        self.mailbox.fail(reason)

    @property
    def doing(self) -> str:
        """What the compute thread does now; to say something new is progress."""
        return self._doing

    @doing.setter
    def doing(self, what: str) -> None:
        self._doing = what
        beat()

    def status(self) -> Status:
        """How far it is, what it does, and what it waits for."""
        what = self.mailbox.waiting_for
        line = f"{self.title}: {self.doing}" + (f", waiting for {what}" if what else "")
        waiting: Literal["", "peer", "idle"] = "" if what is None else "idle" if self.mailbox.idle else "peer"
        return Status(beats(), waiting, line, self.load_progress)

    # -- what it trains ----------------------------------------------------------------------

    @abstractmethod
    def trained(self, what: str) -> Iterable[tuple[str, Tensor]]:
        """(parameter name, live view) of all that this actor's optimizer updates.

        Worker 0 holds the masters of all stages, the other workers hold none.

        Args:
            what: "param", "grad", or one of the optimizer's `state_kinds`.
        """

    @abstractmethod
    def lora(self, what: str) -> Mapping[str, Tensor]:
        """The LoRA that this actor computes with ("param"), or its gradients ("grad"), by name."""

    @abstractmethod
    def discard(self) -> None:
        """Forget gradients, messages and counts of a failed step."""

    @abstractmethod
    def _set_step(self, step: int) -> None:
        """Number of updates that the optimizer has taken."""

    def committed(self) -> int | None:
        """Number of optimizer steps in this actor's state; None = its state is lost."""
        return None if self.reborn else self._committed + 1

    def skip(self, step: int) -> None:
        """Forget a step's gradients; the step counts as taken."""
        self.discard()
        self._set_step(step + 1)
        self._committed = step

    def largest_gradients(self, count: int) -> list[tuple[float, str]]:
        """After `prepare`: norm and name of the largest gradients."""
        return gradient_norms(self.trained("grad"), count)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.lora("param").items()}

    def parameters(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self.lora("param").items()}

    def gradients(self) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in self.lora("grad").items()}

    def set_parameters(self, values: dict[str, Tensor]) -> None:
        """Overwrite what is trained by name; names of other actors are ignored."""
        for name, tensor in self.trained("param"):
            if name in values:
                tensor.copy_(values[name])

    def _state(self, what: str) -> dict[str, Tensor]:
        return {f"{what}/{name}": tensor for name, tensor in self.trained(what)}

    def save_shard(self, directory: str) -> ShardInfo | None:
        """Write parameters and moments. None when this actor trains nothing."""
        tensors: dict[str, Tensor] = {}
        for what in ("param", *state_kinds(self.optim)):
            tensors |= {name: tensor.cpu().contiguous() for name, tensor in self._state(what).items()}
        return write_shard(directory, f"{self.name}.safetensors", tensors) if tensors else None

    def restart(self) -> None:
        """Back to before the first step: initial LoRA, no moments."""
        self._restart_lora()
        if self._spec.start is not None:
            self._read_start(self._spec.start)
        self._begin_from(0)

    @abstractmethod
    def _restart_lora(self, seed: int | None = None) -> None:
        """Initial values, no moments; seed: None = the run's."""

    # -- several trainings over one base ------------------------------------------------------

    @abstractmethod
    def _training_state(self) -> list[tuple[Tensor, bool]]:
        """All tensors that are the present training's own, in one order: values, gradients, moments; and
        whether each stays where it is: on a GPU, or at an address that others know."""

    @abstractmethod
    def _moved(self) -> None:
        """What `_training_state` gave lies elsewhere now."""

    def switch_training(
        self, name: str, before: str | None, seed: int | None, part: LoraPart = WHOLE
    ) -> None:
        """Put the present training aside and go on with another one.

        Args:
            before: the present one's name; None = it ends.
            seed: of a new one's initial LoRA, whose masters follow as after `restart`; None = one that was
                put aside.
            part: that a new one is limited to.
        """
        self.claim_thread()
        state, step = self._training_state(), 0
        if seed is None:
            self._put_aside(name)
            values, step = self._aside.pop(name)
            self._exchange(state, values)
        elif before is not None:
            values = [torch.zeros_like(tensor, device="cpu") for tensor, _ in state]
            self._exchange(state, values)
        if before is not None:
            self._aside[before] = values, self._committed + 1
        if seed is not None:
            self._restart_lora(seed)
            for own, value in self.lora("param").items():
                limit(part, own, value)
            self._begin_from(0)
        self._set_step(step)
        self._committed = step - 1

    def _exchange(self, state: Iterable[tuple[Tensor, bool]], values: Iterable[Tensor]) -> None:
        """What `_training_state` gave for these values on the host: pointers, where both may move."""
        for (tensor, stays), value in zip(state, values, strict=True):
            mine, other = tensor.data, value.data
            if stays:
                value.data = mine.to("cpu", copy=True)
                mine.copy_(other)
            else:
                tensor.data, value.data = other, mine
        self._moved()

    def _put_aside(self, name: str) -> list[Tensor]:
        """The state of a training that was put aside, live."""
        if name not in self._aside:
            raise RuntimeError(f"{self.title} has no training {name!r} put aside")
        return self._aside[name][0]

    def end_training(self, name: str) -> None:
        """Forget one that was put aside."""
        self._aside.pop(name, None)

    def restore(self, directory: str, step: int, optimizer: bool = True) -> None:
        """Take parameters and moments by name from a checkpoint; `step` updates were taken so far.

        Args:
            optimizer: False = parameters alone; moments are zero.
        """
        for what in () if optimizer else state_kinds(self.optim):
            for _, tensor in self.trained(what):
                tensor.zero_()
        for what in ("param", *(state_kinds(self.optim) if optimizer else ())):
            # Straight into place: a copy of one kind would be gigabytes for a large model.
            if state := self._state(what):
                read_named_into(directory, state)
        self._set_step(step)
        self._begin_from(step)

    def _begin_from(self, step: int) -> None:
        self.discard()
        self._committed = step - 1
        self.reborn = False

    def load_adapter(self, directory: str, one_of_several: bool = False) -> int:
        """Take what is trained from a PEFT adapter. Returns the number of tensors."""
        parameters = list(self.trained("param"))
        if not parameters:
            return 0
        reader = AdapterReader(directory, self._spec.model_dir)
        others: Literal["zero", "refused"] = "zero" if one_of_several else "refused"
        return reader.read_into(parameters, self._spec.lora, others=others)

    @abstractmethod
    def keep_adapter(self, name: str, copy: bool) -> None:
        """Keep this actor's present LoRA for passes and requests that name it; `copy` if it will change."""

    @abstractmethod
    def drop_adapter(self, name: str) -> None:
        """Forget a copy that was kept, if it is there."""

    @abstractmethod
    def adapter(self, which: bool | str = True) -> Mapping[str, Tensor]:
        """This actor's part of the adapter file, of the present LoRA (True) or of one that was kept."""

    def write_adapter(self, directory: str, layout: Any, which: bool | str = True) -> int:
        """Write this actor's byte ranges of the adapter file: of every tensor what it has room for, from the
        beginning; `which` as in `adapter`. Returns the number of tensors."""
        tensors = {
            name: value[tuple(map(slice, layout.shapes[name]))]
            for name, value in self.adapter(which).items()
            if name in layout.shapes
        }
        if tensors:
            write_tensors(directory, layout, tensors)
        return len(tensors)


def title(address: Address) -> str:
    """ "attention worker 0", "expert actor 1"."""
    return f"{'attention worker' if address[0] == 'worker' else 'expert actor'} {address[1]}"


def worker_of_layer(plan: Plan, layer: int, replica: int) -> Address:
    """The attention worker that computes a layer of a replica."""
    for worker in plan.workers:
        if worker.replica == replica and worker.layers[0] <= layer < worker.layers[1]:
            return ("worker", worker.rank)
    raise ValueError(f"no worker of replica {replica} owns layer {layer}")
