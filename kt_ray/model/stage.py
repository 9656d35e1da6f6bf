"""One stage of a Hugging Face MoE model on one device: built, adapted, checked, ready for passes.

Plain Python: no actors, no threads. `begin` starts a pass; the returned `LayerLoop` runs its operations.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from kt_ray.batch import PassSpec
from kt_ray.checkpoint.names import MAGNITUDE
from kt_ray.cpu_products import widen_products
from kt_ray.errors import UserError
from kt_ray.gpu import choose_kernels
from kt_ray.model.build import StageModel, build_stage_model
from kt_ray.model.clock import Clock
from kt_ray.model.dropout import DropoutContext
from kt_ray.model.embedding_noise import with_noise
from kt_ray.model.handed_results import HandedResults, Hands, find_hands
from kt_ray.model.head_ranges import SHORTER_ROWS, HeadRanges, find_ranges
from kt_ray.model.hidden_shelf import HostShelf
from kt_ray.model.known_outputs import KnownOutputs, find_all
from kt_ray.model.layer_calls import RecordedCall
from kt_ray.model.layer_checks import check_family, check_packing, padding_moves, probe_layer
from kt_ray.model.layer_loop import LayerLoop, StageExchange
from kt_ray.model.lora import AdapterSwitch, initial_lora, inject_lora, resolve_targets
from kt_ray.model.pissa import relative_to_weights
from kt_ray.model.range_loop import RangeLoop
from kt_ray.model.routing import RouterWatch
from kt_ray.model.stage_spec import StageSpec
from kt_ray.model.state import GroupState, MicroState
from kt_ray.model.token_exchange import ExpertExchange
from kt_ray.model.token_loss import Head
from kt_ray.optim.flat_parameters import FlatParameters

# transformers sets torch's default dtype and device while it builds: one stage of a process at a time
_building = threading.Lock()


class Stage:
    """Builds, cuts, loads, adapts and probes; then runs passes.

    Attributes:
        first: whether this stage embeds. last: whether it has the head.
        moe_layers: own layers with routed experts.
        parameters: canonical name -> float32 LoRA parameter, gradients in `.grad`.
        flat: the vectors that the parameters and their gradients are views of.
        principal: PiSSA: the parameters' initial values, on the CPU; else empty.
        state_shape: of the hidden state between layers after [b, s]: (H,), or (streams, H).
        dtype: of the hidden state.
        masks_padding: whether layers are told which positions are padding (`_look_at_padding`).
        padding_moves: the first layer whose rows change with the padding beside them, or "" (not looked at
            unless `spec.padded`).
        scales: MoE layer -> c of h_out = h_partial + c·y, or None where the layer is not affine in y.
        hands: what layers hand to later ones beside the hidden state.
        dropout: which rows the next layer call holds.
        head: of the last stage.
        adapters: which adapter the layers use.

    Raises:
        UserError: the model cannot be run, named before its weights are read.
    """

    loop = LayerLoop  # what runs a pass

    def __init__(self, spec: StageSpec) -> None:
        choose_kernels()
        with _building:
            self._build(spec)

    def _build(self, spec: StageSpec) -> None:
        self.spec = spec
        self.device = torch.device(spec.device)
        self.model: StageModel = build_stage_model(spec)
        model = self.model
        self.first, self.last = spec.first, spec.last
        self.moe_layers = tuple(sorted(model.experts))
        self.num_experts, self.top_k = model.num_experts, model.top_k
        self.hidden_size, self.vocab_size, self.dtype = model.hidden_size, model.vocab_size, model.dtype
        if self.device.type == "cpu" and self.dtype == torch.bfloat16:
            widen_products()
        check_family(model.capture, self.first, self.last, model.hidden_size, spec.device)
        self.state_shape = model.capture.state_shape
        self.dropout = DropoutContext()
        self.parameters = self._inject(model)
        self.flat = FlatParameters(self.parameters, self.device)
        self.streamed = model.streamed
        if self.streamed is not None:
            self.streamed.attach(model.layers)
        self.adapters = AdapterSwitch(model.layers, self.parameters)
        # PiSSA's come from weights that are changed by taking them: kept for a restart and for the export.
        self.principal = {
            name: p.detach().cpu().clone()
            for name, p in self.parameters.items()
            if spec.lora.init.startswith("pissa")
        }
        self.magnitudes = {
            name: p.detach().cpu().clone() for name, p in self.parameters.items() if name.endswith(MAGNITUDE)
        }
        self.hands = self._find_hands()
        if spec.activations == "host":
            self._check_planned()
        self.scales = self._probe()
        self.known_outputs = self._find_known_outputs()
        self.ranges = self._find_ranges() if spec.head_ranges else {}
        self.masks_padding, self.padding_moves = True, ""
        if spec.padded:
            self._look_at_padding()
        self.head = Head(model, spec.loss_chunk) if self.last else None
        self.shelf = HostShelf(self.device, most=spec.waiting) if spec.activations == "host" else None
        if self.ranges:
            self.shelf = HostShelf(self.device, "lower data.max_length", most=spec.waiting)
        self._watch: RouterWatch | None = None
        self._packing_checked = False

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights and buffers held, adapters included."""
        tensors = [*self.model.causal.parameters(), *self.model.causal.buffers()]
        return sum({id(t): t.numel() * t.element_size() for t in tensors}.values())

    def _inject(self, model: StageModel) -> dict[str, nn.Parameter]:
        prefixes = tuple(name + "." for name in model.names.values())
        targets = resolve_targets(
            self.spec.lora.target_modules,
            model.lora_names,
            self.spec.lora.layers,
            experts=self.spec.lora.experts,
        )
        return inject_lora(
            {name: model.layers[index] for index, name in model.names.items()},
            [name for name in targets if name.startswith(prefixes)],
            self.spec.lora,
            self.spec.seed,
            self.dropout,
            self.device,
        )

    def _find_hands(self) -> Hands:
        model = self.model
        hidden = self._trial_hidden()
        calls = model.capture.record({"input_ids": self._trial_ids(hidden)}, None)
        with self._zero_experts():
            return find_hands(model.capture, model.layers, calls, hidden)

    def _check_planned(self) -> None:
        """What waits in host memory has its place there in the plan."""
        unknown = {by for taken in self.hands.takes.values() for by in taken.values()}
        unknown -= {result.layer for result in self.spec.handed}
        if unknown:
            raise UserError(
                f"{self.model.causal.config.model_type} cannot train with rule.activations=host",
                where=f"layer {min(unknown)}",
                observed="later layers take what it computes, which the plan does not know",
                remedy="set rule.activations=micro_batch",
            )

    def _trial_hidden(self) -> Tensor:
        """Random [2, 4, *state_shape] to try layers on."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn((2, 4, *self.state_shape), generator=generator, dtype=torch.float32)
        return hidden.to(self.device, self.dtype)

    def _trial_ids(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape[:2], dtype=torch.int64, device=self.device)

    def _trial_calls(self) -> tuple[dict[int, RecordedCall], tuple[int, ...]]:
        """The layers' calls for a hidden state of this shape, with what they take from each other."""
        hidden = self._trial_hidden()
        calls = self.model.capture.record({"input_ids": self._trial_ids(hidden)}, None)
        with self._zero_experts():
            return self.hands.given(self.model.layers, calls, hidden), tuple(hidden.shape)

    def _probe(self) -> dict[int, float | None]:
        model = self.model
        calls, shape = self._trial_calls()
        numbers = tuple(v for v in model.causal.config.to_dict().values() if isinstance(v, float) and v)
        return {
            layer: probe_layer(model.layers[layer], calls[layer], context, shape, numbers, seed=layer)
            for layer, context in sorted(model.experts.items())
        }

    def _find_known_outputs(self) -> dict[int, KnownOutputs]:
        model = self.model
        calls, shape = self._trial_calls()
        found = find_all(model.layers, calls, model.experts, shape, self.dtype)
        if self.spec.attention_output == "retain":
            return found
        return {layer: replace(known, retained=None) for layer, known in found.items()}

    def _find_ranges(self) -> dict[int, HeadRanges]:
        model = self.model
        twice = [layer for layer, scale in self.scales.items() if scale is None]
        if twice:
            raise UserError(
                f"{model.causal.config.model_type} cannot train with rule.activations=ranges",
                where=f"layer {twice[0]}",
                observed="its output is not affine in that of its experts",
                remedy=SHORTER_ROWS,
            )
        if self.hands:
            raise UserError(
                f"{model.causal.config.model_type} cannot train with rule.activations=ranges",
                where=f"layer {min(self.hands.takes)}",
                observed="it takes what an earlier layer computed",
                remedy=SHORTER_ROWS,
            )
        calls, shape = self._trial_calls()
        probe = (shape, self.dtype, self.spec.head_ranges, model.causal.config.model_type)
        return find_ranges(model.layers, calls, model.experts, *probe)

    def _look_at_padding(self) -> None:
        """Find out whether padding moves rows, on a GPU first without a mask.

        A mask is [b, 1, s, s] for transformers, and with one torch's flash kernel is not taken, nor the
        hidden half of the pairs skipped. CPU kernels take a mask; there it stays, so that gradients keep
        their bits (grouped keys add up in another order without one).
        """
        layers = (self.model.capture, self.model.layers, self.hands, self.device)
        with self._zero_experts():
            if self.device.type == "cuda":
                self.masks_padding = bool(padding_moves(*layers, masked=False))
            if self.masks_padding:
                self.padding_moves = padding_moves(*layers, masked=True)

    @contextmanager
    def _zero_experts(self) -> Iterator[None]:
        """Experts answer zeros."""
        with ExitStack() as stack:
            for context in self.model.experts.values():
                stack.enter_context(context.handled_by(lambda x, ids, weights: torch.zeros_like(x)))
            yield

    # ------------------------------------------------------------------ a pass

    def begin(
        self, spec: PassSpec, replica: int, experts: ExpertExchange, stages: StageExchange | None = None
    ) -> LayerLoop:
        """Start a pass of a replica's micro-batches: record their call arguments. See LayerLoop."""
        clock = Clock(self.device)
        slots = None if self.streamed is None else self.streamed.slots
        if slots is not None:
            slots.begin(wraps=spec.kind != "train")
        self.adapters.switch_all(spec.adapters)
        watching = spec.routing or spec.router_slopes is not None
        if watching and self._watch is None:
            self._watch = RouterWatch(self.model.causal, self.model.layers, self.top_k, self.num_experts)
        if self._watch is not None:
            self._watch.reset(watching)
        with clock.device("attention"):
            groups = [
                GroupState([self._record(MicroState.create(mb, self.device), spec) for mb in group])
                for group in spec.wave[replica]
            ]
        own = (self.model, self.scales, self.adapters, self.dropout, self.head)
        links = (experts, stages, clock, self._watch)
        if self.ranges and self.loop is LayerLoop:
            assert self.shelf is not None
            return RangeLoop(
                *(*own, spec, groups, *links),
                passed=self.spec.backward,
                slots=slots,
                known=self.known_outputs,
                ranges=self.ranges,
                count=self.spec.head_ranges,
                retain=self.spec.attention_output == "retain",
                host=self.shelf,
            )
        if self.shelf is not None and spec.kind == "train":
            shapes = [(*m.batch.input_ids.shape, *self.state_shape) for group in groups for m in group.micro]
            passed = [layer for layer in self.model.layers if layer >= self.spec.backward.lowest]
            known = [self.known_outputs[layer] for layer in passed if layer in self.known_outputs]
            retained = sum(one.retained is not None for one in known)
            outputs = [(*shape[:2], shape[-1]) for shape in shapes]
            results = [
                result.bytes(b * s, s, self.dtype.itemsize)
                for result in self.spec.handed
                if result.layer in self.model.layers and result.last in passed
                for b, s, *_ in shapes
            ]
            self.shelf.clear(shapes * len(passed) + outputs * retained, self.dtype, results)
        return self.loop(
            *(*own, spec, groups, *links, self.shelf, slots),
            retain_layers=self.spec.activations == "retain",
            whole_groups=self.spec.activations == "group",
            known=self.known_outputs,
            passed=self.spec.backward,
        )

    def _record(self, micro: MicroState, spec: PassSpec) -> MicroState:
        last = len(self.model.capture.stubs) - 1

        def note(index: int, hidden: Tensor) -> Tensor:
            if index == 0 and self.first:
                micro.embedded = hidden.cpu() if self.ranges else hidden
            # What the model does after its layers, a norm in float32, needs more than such rows leave.
            return hidden[:, :1] if self.ranges and index == last else hidden

        # Token ids on every stage: see BlankEmbedding.
        inputs = {"input_ids": torch.from_numpy(micro.batch.input_ids).to(self.device)}
        if micro.documents is not None:
            self.check_packing()
            # transformers makes a block-diagonal mask of position ids that restart (masking_utils)
            inputs["position_ids"] = micro.documents
        with self._noise(micro, spec):
            calls = self.model.capture.record(inputs, micro.mask if self.masks_padding else None, note)
        micro.calls = {layer: calls[layer] for layer in self.model.layers}
        micro.handed = HandedResults(self.hands)
        return micro

    @contextmanager
    def _noise(self, micro: MicroState, spec: PassSpec) -> Iterator[None]:
        """NEFTune on what the embedding gives, as transformers has it."""

        def add(module: nn.Module, inputs: object, embedded: Tensor) -> Tensor:
            return with_noise(embedded, micro, spec.noise_alpha, spec.seed, spec.step)

        if not (self.first and spec.noise_alpha and spec.dropout):
            yield
            return
        with self.model.causal.get_input_embeddings().register_forward_hook(add):
            yield

    def check_packing(self) -> None:
        """Raises UserError where a layer mixes packed documents; once per stage."""
        if not self._packing_checked:
            with self._zero_experts():
                check_packing(self.model.capture, self.model.layers, self.hands, self.device)
            self._packing_checked = True

    # ------------------------------------------------------------- parameters

    def zero_grad(self) -> None:
        """Set every gradient to zeros."""
        self.flat.grads.zero_()

    def initial_parameters(self, seed: int | None = None) -> dict[str, Tensor]:
        """Every parameter's value before the first step. seed: None = the run's; PiSSA and DoRA have none."""
        spec = self.spec
        seed = spec.seed if seed is None else seed
        return (
            self.principal
            or {
                name: initial_lora(seed, name, p.shape, spec.lora.init) for name, p in self.parameters.items()
            }
            | self.magnitudes
        )

    def adapter(self, which: bool | str = True) -> dict[str, Tensor]:
        """The adapter of the unchanged weights, on the CPU: the parameters or what was kept, or PiSSA's of
        rank 2r."""
        values = self.parameters if which is True else self.adapters.kept(which)
        now = {name: value.detach().cpu().clone() for name, value in values.items()}
        return relative_to_weights(now, self.principal) if self.principal else now

    @torch.no_grad()
    def load_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Copy new values into parameters of these names."""
        for name, value in values.items():
            self.parameters[name].copy_(value)
