"""The controller's client of the SGLang engines: requests, routing, batches."""
