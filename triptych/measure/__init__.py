"""Measurements of services on this machine, by commands of every installation: splitting, transfers, and faults under
load. They share one client that puts a service under load, and one way to draw."""
