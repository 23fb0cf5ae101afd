"""What `doctor` and every launch check; each answer is a Finding."""
