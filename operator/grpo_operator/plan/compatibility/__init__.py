"""Versions of KubeRay and of the CRDs that this operator works with."""
