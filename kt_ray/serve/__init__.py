"""The OpenAI-compatible protocol over `kt_ray.generate`: requests, answers, errors, access. No actors."""
