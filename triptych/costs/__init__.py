"""What work costs: fitted forms, and the profile of a model on a machine that holds them. No device, no socket."""
