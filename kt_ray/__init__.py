"""kt_ray: LoRA fine-tuning of Mixture-of-Experts models that are too large for the GPUs at hand."""

__version__ = "0.1.0"
