"""How experts and other weights are stored, and their bytes, from quantization_config alone."""

from __future__ import annotations

from typing import Any

import pytest

from kt_ray.dims import weight_formats
from kt_ray.dims.model_dims import Quantised
from kt_ray.dims.weight_formats import BACKEND_STORAGE, Storage
from tests.helpers.corrupt.quantised import ROTATED
from tests.placement.configs import small_dims

# small_dims(): experts of gate and up [40, 64], down [64, 40]; 3 MoE layers of 8 experts.
VALUES = 3 * 40 * 64
FP8 = {"quant_method": "fp8", "weight_block_size": [16, 24]}


def packed(ignore: list[str] | None = None, format: str = "", **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ignore or [],
        "format": format,
    }


def quark(**weight: Any) -> dict[str, Any]:
    config = {"weight": {"dtype": "fp8_e4m3", **weight}}
    return {"quant_method": "quark", "global_quant_config": config, "exclude": ["lm_head", "*mlp.gate"]}


@pytest.mark.parametrize(
    ("quantization", "fmt", "each"),
    [
        # Blocks of 16 x 24, counted up: [40, 64] has 3 x 3 of them, [64, 40] 4 x 2.
        (FP8, "fp8_block", VALUES + 4 * (9 + 9 + 8)),
        ({"quant_method": "fp8"}, "fp8", VALUES + 4 * 3),
        ({"quant_method": "fbgemm_fp8"}, "fp8", VALUES + 4 * (40 + 40 + 64)),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "fp8", VALUES + 4 * 3),
        ({"quant_method": "modelopt", "kv_cache_scheme": "FP8"}, "bf16", 2 * VALUES),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "fp8", VALUES + 4 * 144),
        ({"quant_method": "mxfp8"}, "fp8_block", VALUES + 40 * 2 + 40 * 2 + 64 * 2),
        (quark(qscheme="per_tensor"), "fp8", VALUES + 4 * 3),
        (
            quark(qscheme="per_channel") | {"algo_config": [{"name": "rotation", "r1": True, "r4": False}]},
            *("fp8", VALUES + 4 * (40 + 40 + 64)),
        ),
        (quark(qscheme="per_block", block_size=[16, 24]), "fp8_block", VALUES + 4 * (9 + 9 + 8)),
        (
            quark(dtype="fp4", qscheme="per_group", group_size=32, scale_format="e8m0"),
            *("mxfp4", VALUES // 2 + 40 * 2 + 40 * 2 + 64 * 2),
        ),
        (packed(format="pack-quantized", num_bits=8, type="int"), "int8", VALUES + 2 * (40 + 40 + 64)),
        (packed(num_bits=8, type="float", strategy="channel"), "fp8", VALUES + 2 * (40 + 40 + 64)),
        (packed(num_bits=8, type="float", strategy="tensor"), "fp8", VALUES + 2 * 3),
        (
            packed(num_bits=8, type="float", strategy="block", block_structure=[16, 24]),
            "fp8_block",
            VALUES + 2 * (9 + 9 + 8),
        ),
        (packed(num_bits=8, type="int", strategy="channel"), "int8", VALUES + 2 * (40 + 40 + 64)),
        (
            packed(num_bits=8, type="int", strategy="channel")
            | {"transform_config": {"config_groups": {"R1": {"apply": [{"location": "weight_input"}]}}}},
            "int8",
            VALUES + 2 * (40 + 40 + 64),
        ),
        (
            packed(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True),
            "int4",
            VALUES // 2 + 2 * (40 * 2 + 40 * 2 + 64 * 2),
        ),
        ({"quant_method": "mxfp4"}, "mxfp4", VALUES // 2 + 40 * 2 + 40 * 2 + 64 * 2),
        (packed(num_bits=4, type="float", group_size=32), "mxfp4", VALUES // 2 + 40 * 2 + 40 * 2 + 64 * 2),
    ],
)
def test_experts_to_the_byte(quantization: dict[str, Any], fmt: str, each: float) -> None:
    dims = small_dims(quantization_config=quantization)
    assert (dims.expert_format, dims.refusal) == (fmt, None)
    assert dims.expert_bytes() == 3 * each


def test_plain_experts_and_biases() -> None:
    assert small_dims().expert_bytes() == 3 * VALUES * 2
    assert small_dims(torch_dtype="float32").expert_bytes() == 3 * VALUES * 4
    # gpt-oss: 4 layers; I = 96; biases of gate, up and down are float32 in memory.
    dims = small_dims("gpt_oss", quantization_config={"quant_method": "mxfp4"})
    assert dims.expert_bytes() == 4 * (3 * 96 * 64 // 2 + 2 * 96 * 2 + 64 * 3 + 4 * (2 * 96 + 64))


def test_experts_quantised_while_they_stream_in() -> None:
    dims = small_dims(quantization_config=FP8)
    assert dims.expert_bytes(BACKEND_STORAGE["AMXINT8"]) == 3 * (VALUES + 2 * (40 + 40 + 64))
    # Groups of 128 are halved until they divide a row: 64 columns one group, 40 columns groups of 8.
    assert dims.expert_bytes(BACKEND_STORAGE["AMXINT4"]) == 3 * (VALUES // 2 + 2 * (40 + 40 + 64 * 5))
    assert BACKEND_STORAGE["AMXINT4"].matrix_bytes(10, 300) == 10 * 150 + 10 * 3 * 2


def test_native_scales_of_deepseek_v4_are_bytes() -> None:
    changes = {"quantization_config": {**FP8, "scale_fmt": "ue8m0"}}
    assert small_dims("deepseek_v4", **changes).expert_storage == Storage("fp8_block", (16, 24), 1)
    assert small_dims("deepseek_v3", **changes).expert_storage == Storage("fp8_block", (16, 24), 4)
    four_bit = small_dims("deepseek_v4", expert_dtype="fp4", **changes)
    assert four_bit.expert_storage == Storage("mxfp4", (1, 32), 1)
    assert any(q.params for q in four_bit.quantised)  # the rest is FP8


@pytest.mark.parametrize(
    "ignore",
    [
        ["re:.*experts.*"],
        ["re:.*mlp.*"],
        ["*mlp*"],
        ["model.layers.1.mlp", "model.layers.2.mlp", "model.layers.3.mlp"],
    ],
)
def test_excluded_experts_are_plain(ignore: list[str]) -> None:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    dims = small_dims(quantization_config=packed(ignore, **weights))
    assert (dims.expert_format, dims.plain_expert_layers) == ("bf16", ())
    assert dims.expert_bytes() == small_dims().expert_bytes()


def test_experts_excluded_in_some_layers() -> None:
    dims = small_dims(quantization_config={**FP8, "modules_to_not_convert": ["model.layers.2"]})
    assert (dims.expert_format, dims.plain_expert_layers) == ("fp8_block", (2,))
    assert dims.expert_bytes() == 2 * (VALUES + 4 * 26) + 2 * VALUES
    assert "the experts of 1 of 3 MoE layers are not quantised" in dims.notes


@pytest.mark.parametrize(
    ("exclude", "layers"),
    [("model.layers.1.*", (1,)), ("model.layers.1*", (1, 10, 11)), ("*layers.1.mlp", (1,))],
)
@pytest.mark.parametrize("method", ["quark", "modelopt"])
def test_globs_are_no_regular_expressions(method: str, exclude: str, layers: tuple[int, ...]) -> None:
    """As one, layers.1.* is of layers 10 to 19, too, and layers.1* of every layer."""
    quantization = quark(qscheme="per_tensor") | {"quant_method": method, "quant_algo": "FP8"}
    dims = small_dims(quantization_config=quantization | {"exclude": [exclude]}, num_hidden_layers=12)
    assert (dims.expert_format, dims.plain_expert_layers) == ("fp8", layers)


@pytest.mark.parametrize(
    "pattern", ["gate", "mlp.gate", "lm_head", "model.layers.1.mlp.gate", "re:.*self_attn.*"]
)
def test_exclusions_of_other_modules_leave_experts_quantised(pattern: str) -> None:
    """A router is called gate, an expert's projection gate_proj: patterns end at a dot."""
    key = "ignore" if pattern.startswith("re:") else "modules_to_not_convert"
    dims = small_dims(quantization_config={**FP8, key: [pattern]})
    assert dims.expert_format == "fp8_block" and dims.plain_expert_layers == ()


FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}


@pytest.mark.parametrize(
    ("pattern", "own", "fmt"),
    [
        ("*layers.0.mlp.experts*", {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, "mxfp4"),  # dense
        ("*layers.2.mlp.experts*", {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, "fp8"),
        ("*layers.2.mlp.experts*", {"dtype": "int3"}, "quark"),
    ],
)
def test_single_layers_of_quark_count_as_the_largest(pattern: str, own: dict[str, Any], fmt: str) -> None:
    quantization = quark(**FP4) | {"layer_quant_config": {pattern: {"weight": own}}}
    dims = small_dims(quantization_config=quantization)
    assert (dims.expert_format, dims.plain_expert_layers) == (fmt, ())
    assert (dims.refusal is None) == (fmt != "quark")


@pytest.mark.parametrize("own", [{"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, {"dtype": "int3"}])
def test_what_an_excluded_layer_would_be_does_not_count(own: dict[str, Any]) -> None:
    quantization = quark(**FP4) | {"layer_quant_config": {"*layers.2.mlp.experts*": {"weight": own}}}
    dims = small_dims(quantization_config=quantization | {"exclude": ["*layers.2.*"]})
    assert (dims.expert_format, dims.plain_expert_layers, dims.refusal) == ("mxfp4", (2,), None)


@pytest.mark.parametrize(
    ("target", "plain"),
    [("re:.*layers\\.2\\.mlp\\.experts.*", (1,)), ("re:.*layers\\.1\\.mlp\\.experts.*", (2,))],
)
def test_layers_that_no_group_names_are_plain(target: str, plain: tuple[int, ...]) -> None:
    quantization = packed(num_bits=8, type="float", strategy="channel")
    quantization["config_groups"]["group_0"]["targets"] = [target]
    dims = small_dims(
        "deepseek_v3", num_hidden_layers=3, first_k_dense_replace=1, quantization_config=quantization
    )
    assert (dims.expert_format, dims.plain_expert_layers) == ("fp8", plain)


@pytest.mark.parametrize(
    ("own", "others", "refused"),
    [
        ({"num_bits": 4}, {"num_bits": 4, "actorder": "group"}, ""),
        ({"num_bits": 4, "actorder": "group"}, {"num_bits": 4}, "in an order of their own"),
        ({"num_bits": 3}, {"num_bits": 4}, "of 3 bits"),
    ],
)
def test_what_training_needs_is_read_of_the_experts_group(
    own: dict[str, Any], others: dict[str, Any], refused: str
) -> None:
    """Layer 0 is dense: no group names experts of it."""
    shared = {"type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    quantization = packed(format="pack-quantized")
    quantization["config_groups"] = {
        "group_0": {"targets": ["re:.*self_attn.*"], "weights": shared | others},
        "group_1": {"targets": ["re:.*layers\\.[1-9]\\.mlp\\.experts.*"], "weights": shared | own},
    }
    dims = small_dims("deepseek_v3", first_k_dense_replace=1, quantization_config=quantization)
    assert dims.expert_format == "int4"
    assert refused in (dims.refusal or "") and bool(dims.refusal) == bool(refused)


@pytest.mark.parametrize(
    ("parts", "layers", "attention"),
    [
        (["self_attn"], (), False),
        (["gate", "mlp.gate", "lm_head"], (), True),
        (["model.layers.1.", "shared_expert"], (1,), True),
    ],
)
def test_exclusions_of_awq_are_parts_of_names(
    parts: list[str], layers: tuple[int, ...], attention: bool
) -> None:
    quantization = {"quant_method": "awq", "group_size": 32, "modules_to_not_convert": parts}
    dims = small_dims(quantization_config=quantization)
    assert (dims.expert_format, dims.plain_expert_layers) == ("uint4", layers)
    whole = small_dims(quantization_config={"quant_method": "awq", "group_size": 32}).quantised[0]
    assert (dims.quantised[0].params == whole.params) == attention


AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}


@pytest.mark.parametrize(
    ("changes", "attention"),
    [
        ({"quant_method": "gptq", "bits": 4}, True),
        (AUTO_ROUND | {"packing_format": "auto_round:gptq"}, True),
        ({"quant_method": "gptq", "dynamic": {r"-:.*self_attn": {}}}, False),
        (
            AUTO_ROUND | {"extra_config": {r".*self_attn.*": {"bits": 16}, "mlp.gate": {"bits": 8}}},
            False,
        ),
    ],
)
def test_gptq(changes: dict[str, Any], attention: bool) -> None:
    """Two groups of 32 a row. GPTQModel and AutoRound say by module what is not quantised."""
    dims = small_dims("mixtral", quantization_config={**changes, "group_size": 32, "sym": True})
    plain = small_dims("mixtral")
    assert dims.refusal is None and dims.expert_format == "int4"
    values = plain.expert_bytes() // 2
    assert dims.expert_bytes() == values // 2 + values // 32 * 2
    rows = small_dims("mixtral", quantization_config={**changes, "group_size": -1})
    assert values // 2 < rows.expert_bytes() < dims.expert_bytes()
    assert bool(dims.quantised and dims.quantised[0].params) == attention


@pytest.mark.parametrize(
    ("quantization", "kind", "bits"),
    [
        ({"quant_method": "gptq", "sym": False, "group_size": 32}, "uint4", 4 + 32 / 32),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 32}, "uint4", 4 + 32 / 32),
        (AUTO_ROUND | {"packing_format": "auto_round:auto_awq", "group_size": 32}, "uint4", 4 + 32 / 32),
        (packed(num_bits=4, type="int", group_size=32, symmetric=False), "uint4", 4 + 32 / 32),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 4 + 8 / 16),
        (
            packed(format="nvfp4-pack-quantized", num_bits=4, type="float", group_size=16),
            *("nvfp4", 4 + 8 / 16),
        ),
    ],
)
def test_zero_points_and_scales_of_two_levels(quantization: dict[str, Any], kind: str, bits: float) -> None:
    dims, plain = small_dims("mixtral", quantization_config=quantization), small_dims("mixtral")
    assert (dims.refusal, dims.expert_format) == (None, kind)
    assert dims.expert_bytes() == plain.expert_bytes() * bits / 16


def test_each_layer_of_modelopt_as_it_says() -> None:
    """The experts may be named as one, or one by one; the first layer may have none."""
    four, eight = {"quant_algo": "W4A16_NVFP4", "group_size": 16}, {"quant_algo": "FP8"}
    other = {"model.layers.0.self_attn.q_proj": eight, "model.layers.1.mlp.shared_expert.up_proj": eight}
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    plain = small_dims("mixtral")
    for experts in (
        *("model.language_model.layers.{}.mlp.experts", "model.layers.{}.mlp.experts.0.gate_proj"),
        *("model.layers.*.mlp.experts.*", "model.layers.*.mlp.experts*", "*.mlp.experts.*"),
        *("model.layers.{}*.mlp.experts*", "backbone.layers.{}.mixer.experts.7.up_proj"),
    ):
        own = {experts.format(layer): four for layer in range(4)}
        layers = {**other, **own, "lm_head": four, "model.layers.0.self_attn.k_proj": None}
        layers["mtp.layers.0.mlp.experts"] = eight
        dims = small_dims("mixtral", quantization_config={**quantization, "quantized_layers": layers})
        assert (dims.refusal, dims.expert_format) == (None, "nvfp4")
        assert dims.expert_bytes() == plain.expert_bytes() * 4.5 / 16
        assert [q.params for q in dims.quantised] == [64 * 64, 0, 0, 0]
    quantization["quant_method"] = "modelopt_mixed"
    dims = small_dims("mixtral", quantization_config={**quantization, "quantized_layers": layers})
    assert dims.expert_format == "nvfp4"
    layers |= {"model.layers.*.self_attn.k_proj": eight}
    del layers["model.layers.0.self_attn.k_proj"]
    dims = small_dims("mixtral", quantization_config={**quantization, "quantized_layers": layers})
    assert [q.params for q in dims.quantised] == [64 * 64 + 64 * 32, *3 * [64 * 32]]
    # Some layers are wider, or plain; "1*" means layers from 10 on, too.
    layers = {"model.layers.1*": four, "model.layers.2.mlp": eight}
    dims = small_dims("mixtral", quantization_config={**quantization, "quantized_layers": layers})
    assert (dims.refusal, dims.expert_format, dims.plain_expert_layers) == (None, "fp8", (0, 3))
    layers["model.layers.1.mlp.experts"] = {"quant_algo": "NVFP4_AWQ"}
    dims = small_dims("mixtral", quantization_config={**quantization, "quantized_layers": layers})
    assert dims.refusal and "stored as nvfp4_awq as modelopt packs them" in dims.refusal
    dims = small_dims("mixtral", quantization_config={**quantization, "quantized_layers": other})
    assert (dims.refusal, dims.expert_format) == (None, "bf16")
    quantization["quantized_layers"] = {"model.layers.*.mlp.experts*": four}
    dims = small_dims("mixtral", quantization_config={**quantization, "ignore": ["model.layers.1.*"]})
    assert (dims.expert_format, dims.plain_expert_layers) == ("nvfp4", (1,))
    dims = small_dims("mixtral", quantization_config={**quantization, "ignore": ["*.mlp.experts.*"]})
    assert dims.expert_format == "bf16"


def test_modelopts_list_of_experts_is_not_read_for_each_module_again() -> None:
    """Else a plan of 60 layers with 256 experts, one by one, took half a minute."""

    class Counted(dict[str, Any]):
        read = 0

        def get(self, *given: Any) -> Any:
            Counted.read += 1
            return super().get(*given)

    names = [f"model.layers.{layer}.mlp.experts.{e}.up_proj" for layer in range(4) for e in range(100)]
    layers = {name: Counted(quant_algo="NVFP4") for name in names}
    quantization = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    assert small_dims("mixtral", quantization_config=quantization).expert_format == "nvfp4"
    assert Counted.read <= 3 * len(names)


def test_gptq_of_some_modules() -> None:
    only = [["self_attn.k_proj", "self_attn.v_proj"], ["self_attn.o_proj"]]
    quantization = {"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": only}
    dims = small_dims(quantization_config=quantization)
    assert dims.expert_bytes() == small_dims().expert_bytes() and dims.refusal is None
    assert dims.quantised[0].params > 0
    quantization["modules_in_block_to_quantize"] = [None, 5]
    assert small_dims(quantization_config=quantization).expert_format == "int4"
    quantization["modules_in_block_to_quantize"] = [[f"mlp.experts.{e}.gate_proj" for e in range(8)]]
    dims = small_dims(quantization_config=quantization)
    assert dims.expert_format == "int4" and dims.quantised == ()


def test_names_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases list thousands of modules: matched one by one as patterns, a plan took minutes."""
    monkeypatch.setattr(weight_formats, "matches", None)
    experts = [f"model.layers.2.mlp.experts.{e}.gate_proj" for e in range(8)]
    attention = [f"model.layers.{n}.self_attn." for n in range(4)]
    quantization = packed(num_bits=4, type="int", group_size=32)
    dims = small_dims(quantization_config=quantization | {"ignore": [*attention, *experts, "mlp.gate"]})
    assert (dims.expert_format, dims.plain_expert_layers) == ("int4", (2,))
    assert [q.params for q in dims.quantised] == [3 * 96 * 64, *3 * [3 * 80 * 64]]  # dense and shared MLPs
    targets = [name.replace(".2.", f".{layer}.") for layer in (1, 2, 3) for name in experts]
    quantization["config_groups"]["group_0"]["targets"] = targets
    dims = small_dims(quantization_config=quantization)
    assert (dims.expert_format, dims.plain_expert_layers, dims.quantised) == ("int4", (), ())


def test_groups_that_name_other_modules() -> None:
    quantization = packed(num_bits=8, type="int", strategy="channel")
    quantization["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
    dims = small_dims(quantization_config=quantization)
    assert dims.expert_format == "bf16" and dims.quantised[0].params > 0
    quantization["config_groups"]["group_0"]["targets"] = [r"re:.*experts\.\d+\..*"]
    assert small_dims(quantization_config=quantization).expert_format == "int8"


def test_weights_outside_the_experts() -> None:
    dims = small_dims("mixtral", quantization_config={"quant_method": "fbgemm_fp8"})
    # q and o [64, 64], k and v [32, 64]; a scale of four bytes per row.
    assert set(dims.quantised) == {Quantised(12288, 12288 + 4 * (64 + 64 + 32 + 32), 4096)}
    assert small_dims("mixtral").quantised == ()
    assert small_dims("gpt_oss", quantization_config={"quant_method": "mxfp4"}).quantised == ()
    ignored = {**FP8, "modules_to_not_convert": ["model.layers.0.self_attn", "v_proj"]}
    first, second = small_dims("mixtral", quantization_config=ignored).quantised[:2]
    assert first == Quantised() and second.params == 12288 - 2048


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        ({"quant_method": "gptq", "bits": 8, "sym": False}, "int8 of 8 bits with zero points in the packing"),
        ({"quant_method": "gptq", "bits": 3}, "stored as int4 of 3 bits in the packing of gptq"),
        ({"quant_method": "gptq", "desc_act": True}, "an order of their own (desc_act)"),
        ({"quant_method": "gptq", "group_size": 16}, "groups of 16"),
        ({"quant_method": "auto-round", "bits": 4}, "stored as int4 in the packing of auto-round"),
        ({"quant_method": "awq", "version": "gemv"}, "stored as uint4 in the packing of awq, version gemv"),
        ({"quant_method": "awq", "w_bit": 3}, "stored as uint4 of 3 bits in the packing of awq"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "stored as nf4 in the packing of bitsandbytes",
        ),
        (packed(num_bits=8, type="int", strategy="channel", symmetric=False), "asymmetric int8"),
        (packed(num_bits=4, type="int", group_size=32, actorder="group"), "actorder"),
        (packed(format="pack-quantized", num_bits=6, type="int"), "stored as int8 of 6 bits"),
        (packed(num_bits=3, type="int", group_size=32, symmetric=False), "stored as uint4 of 3 bits"),
        (packed(num_bits=4, type="int", strategy="group", group_size=16), "groups of 16"),
        (packed(num_bits=4, type="int", group_size=32) | ROTATED, "int4 rotated, with rotations left"),
        (
            quark(qscheme="per_tensor") | {"algo_config": [{"name": "rotation", "r1": True, "r4": True}]},
            "fp8 rotated, with rotations left to the model's code (r4)",
        ),
        (
            quark(qscheme="per_tensor")
            | {"algo_config": [{"name": "rotation", "online_config": {"online_rotation_layers": ["mlp"]}}]},
            "left to the model's code (online_rotation_layers)",
        ),
        ({"quant_method": "quanto"}, "stored as quanto"),
        (quark(dtype="fp4", qscheme="per_group", group_size=16), "stored as quark"),
        (quark(qscheme=["per_tensor"]), "stored as quark"),
        (
            quark(qscheme="per_tensor") | {"layer_quant_config": {"*experts*": {"weight": {"dtype": "fp4"}}}},
            "stored as quark",
        ),
    ],
)
def test_formats_that_are_refused_by_name(quantization: dict[str, Any], reason: str) -> None:
    dims = small_dims(quantization_config=quantization)
    assert dims.refusal and reason in dims.refusal
    assert "use the model's BF16 checkpoint, or one in FP8" in dims.refusal
    assert 0 < dims.expert_bytes() <= small_dims().expert_bytes()


def test_what_is_said_of_another_group_is_not_of_the_experts() -> None:
    quantization = packed(num_bits=3, type="int", group_size=32, actorder="group")
    own = packed(num_bits=4, type="int", group_size=32)["config_groups"]["group_0"]
    quantization["config_groups"]["group_0"]["targets"] = ["re:.*self_attn.*"]
    quantization["config_groups"]["group_1"] = own | {"targets": ["re:.*experts.*"]}
    dims = small_dims(quantization_config=quantization)
    assert (dims.refusal, dims.expert_format) == (None, "int4")


def test_float16_experts_are_to_be_converted() -> None:
    assert small_dims(torch_dtype="float32").refusal is None
    refusal = small_dims(torch_dtype="float16").refusal or ""
    assert (
        "stored as f16" in refusal and "python -m kt_ray.tools convert" in refusal and "--to bf16" in refusal
    )
