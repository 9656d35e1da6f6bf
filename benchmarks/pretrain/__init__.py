"""How the demo's base was made, and a way to a base of one's own (docs/data.md, docs/nekoqa.md).

Run from the repository root:

    python -m benchmarks.pretrain.corpus > benchmarks/pretrain/base_corpus.jsonl
    python -m benchmarks.pretrain.train_base --tokenizer kt_ray/demo/assets/base --out kt_ray/demo/assets/base
"""
