"""Fine-tuning tasks: their samples, and the model's loss for them."""
