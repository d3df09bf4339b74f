"""Init container that fetches models and data into the job's store."""
