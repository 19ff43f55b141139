"""Incident 001: an out-of-memory error of a Pythia-70M, blamed on its vocabulary."""

from .model import PythiaConfig as PythiaConfig
from .model import create_pythia_70m as create_pythia_70m
