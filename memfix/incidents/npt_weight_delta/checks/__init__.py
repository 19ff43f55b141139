"""The checks of the claims, by subject."""

from .evidence import Evidence as Evidence
