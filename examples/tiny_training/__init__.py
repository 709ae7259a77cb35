"""Training of the shipped tiny checkpoint: data, a dense differentiable forward, losses and the training loop."""
