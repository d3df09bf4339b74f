"""The page of a run: curves, phases, idle time, faults and samples in one HTML file of bounded size."""
