"""From a checked config to a trained model: resolve, set up, step, loop, evaluate, save, resume."""
