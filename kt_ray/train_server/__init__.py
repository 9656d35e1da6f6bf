"""The Tinker API over one base model: many LoRA trainings and samplers, driven by clients' own loops."""
