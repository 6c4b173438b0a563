"""What somebody does who has just installed Triptych."""
