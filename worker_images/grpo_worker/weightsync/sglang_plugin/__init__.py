"""Process: SGLang's scheduler, one for each rank of an engine. Writes received weights into the model."""
