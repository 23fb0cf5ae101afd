"""GPT, GLM and the layers that both are built of."""
