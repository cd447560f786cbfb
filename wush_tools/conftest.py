"""Fixtures that several files of tests share, so that each is made once."""
from wush_tools.testing import caches, no_weights, pair, report, shelf
