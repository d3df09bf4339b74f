"""Advantages, losses and KL terms. Pure tensor functions."""
