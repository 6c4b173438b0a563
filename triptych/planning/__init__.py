"""Plans: which topology serves a workload best, by simulation."""
