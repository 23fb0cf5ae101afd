"""Compare fine-tuning with transformers and peft."""
