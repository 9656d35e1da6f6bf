"""Layouts and settings that this model or this machine does not have."""

from __future__ import annotations

from kt_ray.native import available_isas
from tests.helpers.bad_input.place import TINY, Case

HAS_AMX = "this machine has AMX" if "amx" in available_isas() else ""

PLAN: list[Case] = [
    Case(
        "more stages than layers",
        TINY + " rule.device=cpu rule.stages=9",
        ["more pipeline stages than layers", "found 9", "at most 3", "set rule.stages=3"],
    ),
    Case(
        "more GPUs than there are",
        TINY + " rule.device=cuda rule.stages=2 rule.replicas=8",
        ["more GPUs than there are", "2 stages, 8 replicas", "required 16 GPUs", "set rule"],
    ),
    Case(
        "layer ranges with a gap",
        TINY + " 'rule.layers=[0-0,2-2]'",
        ["rule.layers=[0-0,2-2]", "layer 1 must begin a range", "begin that range with 1"],
    ),
    Case(
        "layer ranges that overlap",
        TINY + " 'rule.layers=[0-1,1-2]'",
        ["rule.layers=[0-1,1-2]", "layer 2 must begin a range", "rule.layers=null"],
    ),
    Case(
        "layer ranges that end early",
        TINY + " 'rule.layers=[0-0,1-1]'",
        [
            "do not end with the model's last layer",
            "found 1-1",
            "an end at layer 2",
            "correct the last range",
        ],
    ),
    Case(
        "layer counts with a wrong sum",
        TINY + " rule.device=cpu rule.layers=[2,2]",
        ["do not add up", "[2, 2], sum 4", "the sum 3", "correct the counts"],
    ),
    Case(
        "layer patterns that leave a layer out",
        TINY + """ "rule.layers=[{match: 'layers.[01]', device: cpu}]" """,
        ["matches layer 2", "a device for every layer", "add a last entry"],
    ),
    Case(
        "layer patterns with a GPU that is not there",
        TINY + """ "rule.layers=[{match: '.*', device: 'cuda:77'}]" """,
        ["there", "set rule.layers=null"],
    ),
    Case(
        "more sockets than experts",
        TINY + " rule.experts.sockets=9",
        ["more expert actors than experts", "rule.experts.sockets", "found 9", "set rule.experts.sockets=8"],
    ),
    Case(
        "forced ISA that the machine lacks",
        TINY + " rule.experts.isa=amx",
        [
            "forced instruction set is not available",
            "rule.experts.isa on this host",
            "found amx",
            "set rule.experts.isa=auto",
        ],
        skip=HAS_AMX,
    ),
    Case(
        "KT_RAY_ISA unknown",
        TINY,
        [
            "forced instruction set is not available",
            "KT_RAY_ISA on this host",
            "found avx1024",
            "unset KT_RAY_ISA",
        ],
        lambda p: p.monkeypatch.setenv("KT_RAY_ISA", "avx1024"),
    ),
    Case(
        "KT_RAY_ISA that the machine lacks",
        TINY,
        [
            "forced instruction set is not available",
            "KT_RAY_ISA on this host",
            "found amx",
            "unset KT_RAY_ISA",
        ],
        lambda p: p.monkeypatch.setenv("KT_RAY_ISA", "amx"),
        skip=HAS_AMX,
    ),
    Case(
        "more memory than there is",
        TINY + " trainer.batch_size=100000 data.max_length=1000000000",
        ["the plan does not fit", "GB needed", "at most", "mode=plan"],
    ),
    Case(
        "more replicas than rows",
        TINY + " rule.replicas=9",
        ["rule.replicas=9", "trainer.batch_size=8", "set rule.replicas=8"],
    ),
    Case(
        "micro-batch larger than the batch",
        TINY + " trainer.micro_batch_size=9",
        ["trainer.micro_batch_size=9", "trainer.batch_size=8", "set trainer.micro_batch_size=8"],
    ),
    Case(
        "llamafile without a GGUF file",
        TINY + " rule.experts.backend=llamafile",
        ["rule.experts.backend=llamafile", "model.experts_path=null", "set model.experts_path=<file.gguf>"],
    ),
    Case("rank 0", TINY + " lora.rank=0", ["lora.rank=0", "at least 1", "set lora.rank=8"]),
    Case("rank 1000", TINY + " lora.rank=1000", ["lora.rank=1000", "at most 256", "set lora.rank=8"]),
    Case("negative learning rate", TINY + " optim.lr=-1", ["optim.lr=-1.0", "more than 0", "set optim.lr="]),
    Case(
        "LoRA targets that match nothing",
        TINY + " lora.target_modules=[q_projj]",
        ["lora.target_modules", "found q_projj", "kv_b_proj, o_proj, q_a_proj", "change lora.target_modules"],
    ),
    Case(
        "LoRA regex that matches nothing",
        TINY + " lora.target_modules=.*wrong",
        ["lora.target_modules", "found .*wrong", "change lora.target_modules"],
    ),
    Case(
        "LoRA targets inside the routed experts",
        TINY + " lora.target_modules=[experts]",
        ["lora.target_modules", "found experts", "lora.experts trains the routed experts"],
    ),
    Case(
        "nothing to train",
        TINY + " lora.target_modules=none lora.experts=false",
        ["leaves nothing to train", "set lora.target_modules=auto or lora.experts=true"],
    ),
    Case("unknown cluster", TINY + " cluster=slurm", ["cluster=slurm", "local, ray", "choose one of these"]),
]
