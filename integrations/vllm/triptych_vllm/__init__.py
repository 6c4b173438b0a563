"""Feeds an unmodified vLLM with media embeddings of Triptych's encode instances.

``connector`` and ``deepstack`` are all that knows vLLM; nothing else here imports it, or torch.
"""
