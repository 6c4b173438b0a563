"""``triptych profile``: what a model's work costs on this machine."""
