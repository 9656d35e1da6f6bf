"""Attention workers and expert actors as plain classes, and the clusters that run them."""
