"""Study of transfer routes and their lower bound. No job uses it yet; benchmarks and tests run it."""
