"""Plans of the transfers to each engine, their lower bound and predicted seconds. No job uses them yet."""
