"""The checks of this report's claims, by what they measure; see ``judging.py`` of all incidents."""

from .evidence import Evidence as Evidence
