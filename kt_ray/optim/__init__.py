"""Optimizers and learning-rate schedules of float32 LoRA masters."""
