"""How good generated answers are: pure functions from texts, logits and loss sums to figures and tables."""
