"""Routes of a transfer beside their lower bound. A study: no job uses it yet."""
