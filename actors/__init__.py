"""Things that read weights: rollout, reference and reward workers, and the pool that keeps them alive."""
