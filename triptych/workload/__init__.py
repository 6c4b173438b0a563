"""What clients ask of a service: mixes of requests, and traces of what was asked, both without content."""
