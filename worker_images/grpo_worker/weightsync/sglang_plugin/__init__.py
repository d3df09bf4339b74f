"""Process: SGLang's scheduler. Writes received bytes into the model's parameters."""
