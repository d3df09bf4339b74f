"""Reference pages of the documentation, generated from the CRDs, the code and the Helm values."""
