"""The checks of the report's claims, one file per subject."""

from .evidence import Evidence as Evidence
