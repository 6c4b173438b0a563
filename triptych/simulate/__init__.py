"""A service in virtual time: the real router, schedulers, caches, transfers and encode batching, on models of cost."""
