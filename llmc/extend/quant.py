"""The interface of quantisation schemes of checkpoints."""

from llmc.quant.scheme import Codes, Groups, Scheme, Stored, integer, last_part, refuse, shape_of

__all__ = ["Codes", "Groups", "Scheme", "Stored", "integer", "last_part", "refuse", "shape_of"]
