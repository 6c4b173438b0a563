"""Code that several families share. Nothing here knows a model's name."""
