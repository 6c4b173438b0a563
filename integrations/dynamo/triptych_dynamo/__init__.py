"""A vision encoder for Dynamo's vLLM worker that has images encoded by Triptych."""

from triptych_dynamo.encoder import TriptychEncoder

__all__ = ["TriptychEncoder"]
