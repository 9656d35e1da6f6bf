"""What a machine is and how fast: sockets, memory, GPUs, and measured or nominal rates. No torch."""
