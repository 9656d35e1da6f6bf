"""Attention workers, expert actors, what they exchange, and the clusters that run them. Only here is Ray."""
