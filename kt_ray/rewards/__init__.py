"""How good sampled answers are: verifiers that compare them with the data, and functions of the user's."""
