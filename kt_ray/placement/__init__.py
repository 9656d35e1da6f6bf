"""Who holds what and in which order: pure functions from (model, rule, hardware) to a plan. No torch."""
