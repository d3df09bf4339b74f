"""Grafana dashboards of the chart, generated from tables of panels."""
