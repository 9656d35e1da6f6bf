"""How tensors travel between actors: shared memory, doorbells, links. No Ray."""
