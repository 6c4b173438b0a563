"""What several families have in common. Nothing here knows a model's name."""
