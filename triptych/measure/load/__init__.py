"""What commands that put a service under load share: their clients, pictures, processes and drawings."""
