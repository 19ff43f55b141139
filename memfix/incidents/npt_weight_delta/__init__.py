"""Incident 003: an out-of-memory error of a Neuro-Plastic Transformer, which has a weight for every token."""

from .conversion import Conversion as Conversion
from .conversion import convert as convert
