"""Several processes: who this one is, what they add up, and how they share parameters and gradients."""
