"""Configuration: frozen dataclasses, their checks, and errors that say what to write instead.

Imports no torch, ray or transformers, so that a wrong key is reported at once.
"""
