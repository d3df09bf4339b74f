"""The processes in a job's pods: controller, trainer ranks, agents and engines."""
