"""Hugging Face layers of one stage on a device: the layer loop, the experts hook, the checks, LoRA."""
