"""Processes that do what hostile input might break, with limits on memory and time, and can be killed."""
