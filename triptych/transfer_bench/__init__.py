"""What ``triptych bench`` measures. It is part of the package, so that the command works wherever that is installed."""
