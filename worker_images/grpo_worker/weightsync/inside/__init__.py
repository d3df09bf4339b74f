"""What runs inside SGLang's own processes: weights written straight into the model's parameters."""
