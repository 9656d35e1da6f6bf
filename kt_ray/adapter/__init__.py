"""LoRA adapters in PEFT's format: written, read, loaded into a model; the fused form and back."""
