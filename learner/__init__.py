"""The only room that changes weights: a DeepSpeed learner group, one Ray actor per rank."""
