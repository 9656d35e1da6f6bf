"""The adapter: how PEFT stores it, read, written, taken apart and put together."""
